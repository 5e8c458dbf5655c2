// `optimus tokenize`, run as a program.
#include <cstdio>

#include <nlohmann/json.hpp>

#include "data/fixtures.h"
#include "optimus/data/token_file.h"

namespace optimus {
namespace {

struct Result {
  int code;
  std::string out;
  std::string error;
};

class Tokenize : public ::testing::Test {
 protected:
  /// The arguments are given to a shell in the temporary folder.
  Result run(const std::string& arguments) {
    const std::string command =
        fmt::format("cd '{}' && '{}' tokenize {} >stdout 2>stderr", folder_ / "", OPTIMUS_BINARY, arguments);
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_text(folder_ / "stdout"), read_text(folder_ / "stderr")};
  }

  std::vector<int32_t> ids(const std::string& prefix) {
    const TokenFile file(folder_ / prefix, "megatron", 257);
    std::vector<int32_t> ids(size_t(file.size()));
    file.read(0, file.size(), ids.data());
    return ids;
  }

  TemporaryFolder folder_;
};

TEST_F(Tokenize, TextFilesAreDocuments) {
  write_bytes(folder_ / "a.txt", "hi\n");
  write_bytes(folder_ / "b.txt", "\xFFy");
  write_bytes(folder_ / "empty.txt", "");
  const Result result = run("--out new/folder/x a.txt b.txt empty.txt");
  ASSERT_EQ(result.code, 0) << result.error;
  EXPECT_EQ(result.out, R"({"out":"new/folder/x","documents":3,"tokens":8,"vocab":257,"dtype":"uint16"})"
                        "\n");
  EXPECT_EQ(ids("new/folder/x"), (std::vector<int32_t>{'h', 'i', '\n', 256, 0xFF, 'y', 256, 256}));
}

TEST_F(Tokenize, JsonLinesAreDocuments) {
  write_bytes(folder_ / "a.jsonl", "{\"text\": \"a\\nb\", \"id\": 1}\r\n\n  \n{\"text\": \"\\u00e9\"}");
  write_bytes(folder_ / "b.txt", "z");
  Result result = run("--out x a.jsonl b.txt");
  ASSERT_EQ(result.code, 0) << result.error;
  EXPECT_EQ(nlohmann::json::parse(result.out)["documents"], 3);
  EXPECT_EQ(ids("x"), (std::vector<int32_t>{'a', '\n', 'b', 256, 0xC3, 0xA9, 256, 'z', 256}));

  write_bytes(folder_ / "c.jsonl", "{\"body\": \"q\", \"text\": 5}\n");
  result = run("--out y c.jsonl --field body");
  ASSERT_EQ(result.code, 0) << result.error;
  EXPECT_EQ(ids("y"), (std::vector<int32_t>{'q', 256}));
}

TEST_F(Tokenize, ErrorsNameFileAndLineAndLeaveNothing) {
  const auto refused = [&](const std::string& text, const std::string& place) {
    write_bytes(folder_ / "a.jsonl", text);
    const Result result = run("--out x a.jsonl");
    EXPECT_EQ(result.code, 3);
    EXPECT_NE(result.error.find(place), std::string::npos) << result.error;
    for (const std::string name : {"x.bin", "x.idx", "x.bin.partial"}) EXPECT_FALSE(fs::exists(folder_ / name));
  };
  refused("{\"text\": \"a\"}\n\n{\"text\": \"b\"\n", "a.jsonl:3:");
  refused("{\"text\": \"a\"}\n{\"texts\": \"b\"}\n", "a.jsonl:2:");
  refused("{\"text\": 7}\n", "a.jsonl:1:");
  refused("[1]\n", "a.jsonl:1:");
  refused("\n\n", "no documents");
  EXPECT_EQ(run("--out x missing.txt").code, 3);
  EXPECT_EQ(run("--out x a.jsonl --tokenizer tokenizer.json").code, 2);
  EXPECT_EQ(run("a.jsonl").code, 2);
}

}  // namespace
}  // namespace optimus
