// The search for layouts, and what `optimus plan` says of them.
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "plan/layouts.h"
#include "support/program.h"

namespace optimus::test {
namespace {

ProgramResult plan(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "plan");
  return run_program(OPTIMUS_BINARY, arguments);
}

const std::string kAurora = OPTIMUS_SOURCE_DIR "/hardware/aurora.toml";
const std::string kConfig = OPTIMUS_SOURCE_DIR "/configs/mula-220b-a10b.toml";

RunConfig small_config() {
  return parse_config(R"(
[model]
layers = 8
hidden = 512
heads = 4
vocab = 1024
sequence = 512
[model.moe]
experts = 8
top_k = 2
width = 256
[train]
global_batch = 64
[precision]
compute = "bf16"
)",
                      "small.toml", {}, ConfigUse::shape, 16);
}

TEST(Search, BeatsThePublishedLayout) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "minutes under sanitizers; the searches of a small model run";
#endif
  const Hardware aurora = hardware_named("aurora");
  const RunConfig published = published_config(kPublished[2], "ep_aware");
  const SearchResult result = search_layouts(published, aurora, 3);
  ASSERT_EQ(result.best.size(), 3u);
  EXPECT_LE(result.best.front().prediction.step_seconds, predict(published, aurora).step_seconds);
  for (const Candidate& candidate : result.best) {
    EXPECT_LE(double(candidate.memory_bytes), aurora.device_bytes.value);
    EXPECT_EQ(candidate.config.mesh.world(), 3072);
    EXPECT_EQ(candidate.config.tokens_per_step(), published.tokens_per_step());
  }
}

TEST(Search, SettingLayoutsAsideLosesNone) {
  // Where hardly anything but products takes time, a layout's least time is close to what is predicted.
  Hardware products = hardware_named("h200");
  for (Rate Hardware::*cost : {&Hardware::launch, &Hardware::collective_start, &Hardware::node_latency,
                               &Hardware::network_latency, &Hardware::grouped_rows})
    (products.*cost).value /= 1000;
  for (Rate Hardware::*rate : {&Hardware::memory, &Hardware::node_bandwidth, &Hardware::network_bandwidth})
    (products.*rate).value *= 100;
  const SearchResult all = search_layouts(small_config(), products, 100000);
  const SearchResult few = search_layouts(small_config(), products, 30);
  EXPECT_EQ(int64_t(all.best.size()), all.layouts);
  ASSERT_EQ(few.best.size(), 30u);
  for (size_t i = 0; i < few.best.size(); ++i)
    EXPECT_EQ(few.best[i].prediction.step_seconds, all.best[i].prediction.step_seconds);
  for (size_t i = 1; i < all.best.size(); ++i)
    EXPECT_LE(all.best[i - 1].prediction.step_seconds, all.best[i].prediction.step_seconds);
}

TEST(Search, LayoutsAreThoseThatTheConfigurationAccepts) {
  for (const Candidate& candidate : search_layouts(small_config(), hardware_named("h200"), 100000).best)
    EXPECT_NO_THROW(parse_config(to_toml(candidate.config), "again.toml", {}, ConfigUse::shape, 16));
}

TEST(Search, WhatDoesNotFitIsLeftOut) {
  Hardware tiny = hardware_named("h200");
  tiny.device_bytes.value = 1e6;
  EXPECT_TRUE(search_layouts(small_config(), tiny).best.empty());
}

TEST(PlanCommand, JsonOfALayout) {
  const std::vector<std::string> layout = {kConfig, "--ranks",
                                           "12288", "--json",
                                           "--set", "parallel.pp=8",
                                           "--set", "parallel.ep=12",
                                           "--set", "train.global_batch=12288",
                                           "--set", "train.micro_batch=1"};
  const ProgramResult plain = plan(layout);
  ASSERT_EQ(plain.code, 0) << plain.err;
  const nlohmann::json without = nlohmann::json::parse(plain.out);
  EXPECT_EQ(without.at("mesh"), (nlohmann::json{{"pp", 8}, {"ep", 12}, {"dp", 1536}, {"edp", 128}}));
  EXPECT_NEAR(without.at("bubble").get<double>(), 7.0 / 15, 0.03);
  EXPECT_FALSE(without.contains("step_seconds"));

  std::vector<std::string> timed = layout;
  timed.insert(timed.end(), {"--hardware", kAurora});
  const ProgramResult result = plan(timed);
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json json = nlohmann::json::parse(result.out);
  EXPECT_EQ(json.at("memory").at("device_bytes"), 64000000000);
  double sum = 0, segments = 0;
  for (const nlohmann::json& part : json.at("slowest")) sum += part.at("seconds").get<double>();
  EXPECT_NEAR(sum, json.at("step_seconds").get<double>(), 1e-9);
  for (const auto& [name, bytes] : json.at("memory").at("segments").items()) segments += bytes.get<double>();
  EXPECT_EQ(segments, json.at("memory").at("total_bytes").get<double>());
  EXPECT_EQ(json.at("fits"), segments <= 64e9);
  EXPECT_NEAR(json.at("tokens_per_second").get<double>() * json.at("step_seconds").get<double>(), 12288 * 4096.0 / 2,
              1e3);
  bool expert_reduction = false;
  for (const nlohmann::json& entry : json.at("communication"))
    expert_reduction |= entry.at("group") == "edp" && entry.at("operation") == "reduce_scatter" &&
                        entry.at("bytes").get<double>() > 1e9 && entry.at("messages") == 8;
  EXPECT_TRUE(expert_reduction);
}

TEST(PlanCommand, TextNamesGroupsOwnersAndSlowestParts) {
  const ProgramResult result = plan({kConfig, "--ranks", "96", "--hardware", kAurora, "--set", "parallel.pp=8", "--set",
                                     "parallel.ep=12", "--set", "train.global_batch=96"});
  ASSERT_EQ(result.code, 0) << result.err;
  for (const char* words : {"pp 8 x dp 12", "embedding, 0-7", "56-63, head", "20 of 240", "reduce_scatter", "MFU",
                            "slowest parts", "waiting for other stages"})
    EXPECT_NE(result.out.find(words), std::string::npos) << words << "\n" << result.out;
}

TEST(PlanCommand, SearchAsJson) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "minutes under sanitizers; the searches of a small model run";
#endif
  const ProgramResult result = plan({kConfig, "--ranks", "384", "--hardware", kAurora, "--search", "--json", "--set",
                                     "train.global_batch=384", "--set", "precision.gradients=bf16"});
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json layouts = nlohmann::json::parse(result.out).at("layouts");
  ASSERT_EQ(layouts.size(), 10u);
  for (const nlohmann::json& layout : layouts) {
    EXPECT_LE(layout.at("memory_bytes").get<double>(), 64e9);
    EXPECT_GT(layout.at("mfu").get<double>(), 0);
  }
}

TEST(PlanCommand, ImpossibleLayoutsAndQuestionsAreUsageErrors) {
  const ProgramResult ranks = plan({kConfig, "--ranks", "100", "--set", "parallel.ep=7"});
  EXPECT_EQ(ranks.code, 2);
  EXPECT_NE(ranks.err.find("nearest that does is ep = 5"), std::string::npos) << ranks.err;
  const ProgramResult experts =
      plan({kConfig, "--ranks", "288", "--set", "parallel.ep=9", "--set", "train.global_batch=288"});
  EXPECT_EQ(experts.code, 2);
  EXPECT_NE(experts.err.find("nearest that does is"), std::string::npos) << experts.err;
  EXPECT_EQ(plan({kConfig, "--search"}).code, 2);
  EXPECT_EQ(plan({kConfig, "--ranks", "0"}).code, 2);
  const ProgramResult unknown = plan({kConfig, "--hardware", "abacus"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_NE(unknown.err.find("abacus.toml"), std::string::npos) << unknown.err;
  EXPECT_EQ(plan({kConfig, "--hardware", kAurora, "--set", "precision.compute=f32"}).code, 2);
}

}  // namespace
}  // namespace optimus::test
