// Files: mapping, ordered and atomic writing, and the lock that dies with its process.
#include "optimus/base/file.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <optional>
#include <thread>

#include <gtest/gtest.h>

#include "optimus/base/error.h"

namespace optimus::test {
namespace {

class FileTest : public ::testing::Test {
 protected:
  FileTest() {
    std::string pattern = (fs::temp_directory_path() / "optimus_file_test_XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~FileTest() override { fs::remove_all(folder_); }
  fs::path path(const std::string& name) const { return folder_ / name; }

 private:
  fs::path folder_;
};

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kData);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

TEST_F(FileTest, WritesInOrderAcrossTheBuffer) {
  std::string expected;
  {
    OutputFile file(path("out"));
    for (int i = 0; i < 3000; ++i) {
      const std::string piece(size_t(i), char('a' + i % 26));
      file.write(piece);
      expected += piece;
    }
    file.write(std::string(3 << 20, 'z'));
    expected += std::string(3 << 20, 'z');
    EXPECT_EQ(file.size(), int64_t(expected.size()));
    file.write_at(5, "HEAD", 4);
    expected.replace(5, 4, "HEAD");
    file.write("tail");
    expected += "tail";
    file.close();
  }
  EXPECT_TRUE(read_text(path("out")) == expected);
}

TEST_F(FileTest, AppendsAndTruncates) {
  const auto put = [&](std::string_view text, bool append) {
    OutputFile file(path("log"), append);
    file.write(text);
    file.close();
  };
  put("one", false);
  put("two", true);
  EXPECT_EQ(read_text(path("log")), "onetwo");
  put("three", false);
  EXPECT_EQ(read_text(path("log")), "three");
}

TEST_F(FileTest, FlushShowsTheTextToReaders) {
  OutputFile file(path("log"));
  file.write("line\n");
  file.flush();
  EXPECT_EQ(read_text(path("log")), "line\n");
}

TEST_F(FileTest, MapsEmptyAndMovedFiles) {
  write_text_atomically(path("empty"), "");
  EXPECT_EQ(MappedFile(path("empty")).size(), 0);
  EXPECT_EQ(read_text(path("empty")), "");
  write_text_atomically(path("full"), "content");
  MappedFile first(path("full"));
  MappedFile second(std::move(first));
  MappedFile third(path("empty"));
  third = std::move(second);
  ASSERT_EQ(third.bytes().size(), 7u);
  EXPECT_EQ(char(third.bytes()[0]), 'c');
}

TEST_F(FileTest, ErrorsNamePathAndReason) {
  const std::string missing = refusal([&] { MappedFile file(path("missing")); });
  EXPECT_NE(missing.find("missing"), std::string::npos);
  EXPECT_NE(missing.find("No such file"), std::string::npos);
  EXPECT_NE(refusal([&] { MappedFile file(path("")); }).find("directory"), std::string::npos);
  EXPECT_NE(refusal([&] { OutputFile file(path("no/such/folder")); }).find("no/such/folder"), std::string::npos);
  OutputFile full("/dev/full");
  full.write("x");
  EXPECT_NE(refusal([&] { full.close(); }).find("free some space"), std::string::npos);
}

TEST_F(FileTest, MakesNestedFolders) {
  make_folder(path("a/b/c"));
  make_folder(path("a/b/c"));
  EXPECT_TRUE(fs::is_directory(path("a/b/c")));
  write_text_atomically(path("file"), "x");
  refusal([&] { make_folder(path("file/below")); });
}

// While one thread replaces the file again and again, a reader finds one whole version each time.
TEST_F(FileTest, AtomicReplacementNeverShowsAPart) {
  const std::string a(20'000, 'a'), b(40'000, 'b');
  write_text_atomically(path("state"), a);
  std::thread writer([&] {
    for (int i = 0; i < 50; ++i) write_text_atomically(path("state"), i % 2 ? a : b);
  });
  for (int i = 0; i < 200; ++i) {
    const std::string seen = read_text(path("state"));
    EXPECT_TRUE(seen == a || seen == b) << seen.size() << " bytes";
  }
  writer.join();
  EXPECT_EQ(std::distance(fs::directory_iterator(path("")), fs::directory_iterator()), 1) << "a partial file stayed";
}

/// Runs `body` in a child that then waits to be killed; returns its id once body is done.
pid_t child_that_holds(const std::function<void()>& body) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    body();
    char ready = 'r';
    if (write(ends[1], &ready, 1) != 1) _exit(1);
    for (;;) pause();
  }
  char ready;
  EXPECT_EQ(::read(ends[0], &ready, 1), 1);
  close(ends[0]), close(ends[1]);
  return child;
}

TEST_F(FileTest, LockExcludesOtherProcessesAndDiesWithThem) {
  std::optional<FileLock> held;
  const pid_t child = child_that_holds([&] { held.emplace(path("lock"), "run.dir"); });
  const std::string message = refusal([&] { FileLock lock(path("lock"), "run.dir runs/x"); });
  EXPECT_NE(message.find("run.dir runs/x is in use by another process"), std::string::npos);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_NO_THROW(FileLock(path("lock"), "run.dir"));
  EXPECT_NO_THROW(FileLock(path("lock"), "run.dir")) << "released by the destructor";
}

}  // namespace
}  // namespace optimus::test
