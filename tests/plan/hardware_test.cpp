// Descriptions of hardware: what is accepted, what is refused, and the ones that come with the project.
#include <cstdlib>

#include <gtest/gtest.h>

#include "optimus/base/error.h"
#include "optimus/base/file.h"
#include "plan/layouts.h"
#include "support/temporary_folder.h"

namespace optimus::test {
namespace {

std::string shipped(const std::string& name) { return read_text(OPTIMUS_SOURCE_DIR "/hardware/" + name + ".toml"); }

/// The error's text, or "" where the text is accepted.
std::string refusal(const std::string& text) {
  try {
    parse_hardware(text, "x.toml");
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
}

struct Sources {
  int rates = 0;
  void operator()(std::string_view, const std::string&) const {}
  void table(std::string_view key, const Rate& rate) {
    ++rates;
    EXPECT_GT(rate.value, 0) << key;
    EXPECT_GE(rate.source.size(), 7u) << key;
  }
};

TEST(Hardware, EveryShippedRateHasASource) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(OPTIMUS_SOURCE_DIR "/hardware")) {
    if (entry.path().extension() != ".toml") continue;
    Hardware hardware = load_hardware(entry.path().string());
    Sources sources;
    hardware.fields(sources);
    EXPECT_EQ(sources.rates, 18) << entry.path();
    ++files;
  }
  EXPECT_GE(files, 2);
}

TEST(Hardware, UnknownMissingAndUnexplainedRatesAreRefused) {
  const std::string good = shipped("h200");
  EXPECT_EQ(refusal(good), "");
  EXPECT_NE(refusal(good + "\nmatmull = { value = 1, source = \"x\" }").find("did you mean matmul?"),
            std::string::npos);
  const auto edited = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    return text.replace(at, from.size(), to);
  };
  EXPECT_NE(refusal(edited("\nmemory =", "\n#memory =")).find("memory needs a value"), std::string::npos);
  EXPECT_NE(refusal(edited("4.21e12", "0")).find("memory needs a value"), std::string::npos);
  for (const char* absurd : {"1e30", "1e-30"})
    EXPECT_NE(refusal(edited("0.64e9", absurd)).find("no number of any machine"), std::string::npos) << absurd;
  for (const char* devices : {"0.5", "1.5", "1e7"})
    EXPECT_NE(
        refusal(edited("devices_per_node = { value = 8", fmt::format("devices_per_node = {{ value = {}", devices)))
            .find("whole number"),
        std::string::npos)
        << devices;
  EXPECT_NE(refusal(edited("\"data sheet: dense bf16\"", "\"\"")).find("peak.source"), std::string::npos);
  EXPECT_NE(refusal(edited("value = 989e12", "valu = 989e12")).find("did you mean peak.value?"), std::string::npos);
}

TEST(Hardware, IsFoundByName) {
  setenv("OPTIMUS_HARDWARE", OPTIMUS_SOURCE_DIR "/hardware", 1);
  EXPECT_EQ(load_hardware("h200").name, "H200");
  const testing::TemporaryFolder folder;
  testing::write_bytes(folder.path() / "mine.toml", shipped("h200"));
  setenv("OPTIMUS_HARDWARE", folder.path().c_str(), 1);
  EXPECT_EQ(load_hardware("mine").name, "H200");
  try {
    load_hardware("nothing");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("mine"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(folder.path().string()), std::string::npos) << error.what();
  }
  unsetenv("OPTIMUS_HARDWARE");
}

}  // namespace
}  // namespace optimus::test
