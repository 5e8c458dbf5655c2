// The other commands: plan, generate, eval, bench and what all of them promise.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "support/program.h"
#include "support/temporary_folder.h"

namespace optimus::test {
namespace {

using testing::TemporaryFolder;

ProgramResult optimus(const std::vector<std::string>& arguments) { return run_program(OPTIMUS_BINARY, arguments); }

TEST(Commands, HelpAndVersion) {
  EXPECT_EQ(optimus({"--help"}).code, 0);
  EXPECT_EQ(optimus({"--version"}).code, 0);
  for (const char* command : {"train", "tokenize", "generate", "eval", "import", "export", "inspect", "verify", "plan"})
    EXPECT_EQ(optimus({command, "--help"}).code, 0) << command;
  EXPECT_EQ(optimus({}).code, 2);
  EXPECT_EQ(optimus({"trian"}).code, 2);
  EXPECT_EQ(optimus({"train", "--st", "x"}).code, 2);
}

TEST(Commands, PlanOfAModelThatDoesNotFit) {
  const ProgramResult result = optimus({"plan", OPTIMUS_SOURCE_DIR "/configs/mula-220b-a10b.toml", "--json"});
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json plan = nlohmann::json::parse(result.out);
  EXPECT_EQ(plan.at("fits"), false);
  EXPECT_EQ(plan.at("parameters").at("total"), 220205681664);
  EXPECT_NEAR(plan.at("parameters").at("active").get<double>(), 10.021e9, 1e6);
  int64_t sum = 0;
  for (const auto& [name, bytes] : plan.at("memory").at("segments").items()) sum += bytes.get<int64_t>();
  EXPECT_EQ(plan.at("memory").at("total_bytes"), sum);
}

TEST(Commands, FromTextToText) {
  const TemporaryFolder folder;
  const std::string f = folder.path().string();
  std::string text;
  for (int i = 0; i < 400; ++i) text += "the quick brown fox jumps over the lazy dog. ";
  testing::write_bytes(folder.path() / "text.txt", text);
  ASSERT_EQ(optimus({"tokenize", "--out", f + "/text", f + "/text.txt"}).code, 0);
  testing::write_bytes(folder.path() / "run.toml", fmt::format(R"(
[model]
layers = 2
hidden = 64
heads = 4
sequence = 48
[data]
train = ["{0}/text"]
[train]
steps = 60
global_batch = 8
[optimizer]
lr = 5e-3
warmup_steps = 5
[run]
dir = "{0}/run"
)",
                                                               f));
  ASSERT_EQ(optimus({"train", f + "/run.toml"}).code, 0);

  const ProgramResult eval = optimus({"eval", f + "/run", "--data", f + "/text", "--sequences", "20"});
  ASSERT_EQ(eval.code, 0) << eval.err;
  const nlohmann::json losses = nlohmann::json::parse(eval.out);
  EXPECT_LT(losses.at("loss").get<double>(), 0.5);
  EXPECT_EQ(losses.at("tokens"), 20 * 47);
  EXPECT_NEAR(losses.at("perplexity").get<double>(), std::exp(losses.at("loss").get<double>()), 1e-9);

  // Longer than the window, so that it slides.
  const std::vector<std::string> generate{"generate", f + "/run", "--prompt",      "the quick ",
                                          "--tokens", "90",       "--temperature", "0"};
  const ProgramResult sample = optimus(generate);
  ASSERT_EQ(sample.code, 0) << sample.err;
  EXPECT_EQ(sample.out.substr(0, 44), "the quick brown fox jumps over the lazy dog.");
  EXPECT_EQ(sample.out.size(), 10u + 90u + 1u);
  EXPECT_EQ(optimus(generate).out, sample.out);

  EXPECT_EQ(optimus({"verify", f + "/run"}).code, 0);
  const nlohmann::json inspected = nlohmann::json::parse(optimus({"inspect", f + "/run"}).out);
  EXPECT_EQ(inspected.at("step"), 60);
  EXPECT_EQ(optimus({"inspect", f + "/text"}).code, 0);
  EXPECT_EQ(optimus({"inspect", f + "/run.toml"}).code, 0);

  const ProgramResult bench = optimus({"bench", "step", f + "/run.toml", "--steps", "2", "--json"});
  ASSERT_EQ(bench.code, 0) << bench.err;
  EXPECT_GT(nlohmann::json::parse(bench.out).at("share_of_ceiling").get<double>(), 0);
}

TEST(Commands, BadArguments) {
  EXPECT_EQ(optimus({"eval", "/nowhere", "--data", "x"}).code, 3);
  EXPECT_EQ(optimus({"generate", "/nowhere", "--prompt", "x"}).code, 3);
  EXPECT_EQ(optimus({"generate", "/nowhere"}).code, 2);
  EXPECT_EQ(optimus({"export", "/nowhere", "--out", "/nowhere2"}).code, 3);
  EXPECT_EQ(optimus({"import", "/nowhere", "--out", "/nowhere2"}).code, 3);
  EXPECT_EQ(optimus({"inspect", "/nowhere"}).code, 3);
  EXPECT_EQ(optimus({"plan", "/nowhere.toml"}).code, 2);
}

}  // namespace
}  // namespace optimus::test
