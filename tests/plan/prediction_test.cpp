// Predicted times: what must hold whatever the rates are.
#include <gtest/gtest.h>

#include "optimus/plan/links.h"
#include "plan/layouts.h"

namespace optimus::test {
namespace {

double sum_of_parts(const Prediction& prediction) {
  double sum = 0;
  for (const Part& part : prediction.parts) sum += part.seconds;
  return sum;
}

RunConfig with_schedule(RunConfig config, const std::string& schedule, int64_t virtual_stages) {
  config.parallel.schedule = schedule;
  config.parallel.virtual_stages = virtual_stages;
  return config;
}

TEST(Prediction, PartsAddUpToTheStep) {
  for (const PublishedRun& run : kPublished)
    for (const char* sharding : {"none", "dp", "ep_aware"}) {
      const Prediction prediction = predict(published_config(run, sharding), hardware_named("aurora"));
      EXPECT_GT(prediction.step_seconds, 0);
      EXPECT_NEAR(sum_of_parts(prediction), prediction.step_seconds, 1e-9);
      for (const Part& part : prediction.parts) {
        EXPECT_GE(part.seconds, 0) << part.name;
        EXPECT_GE(part.hidden, 0) << part.name;
      }
    }
}

TEST(Prediction, BubbleIsTheSimulations) {
  const RunConfig base = published_config(kPublished[2], "ep_aware");
  for (const auto& [schedule, virtual_stages] : {std::pair{"1f1b", 1}, {"interleaved", 4}, {"zero_bubble", 1}}) {
    const RunConfig config = with_schedule(base, schedule, virtual_stages);
    const Hardware hardware = hardware_named("aurora");
    const Timeline timeline = simulate(schedule_of(config), stage_costs(config, step_work(config), hardware));
    EXPECT_DOUBLE_EQ(predict(config, hardware).bubble, timeline.bubble) << schedule;
    EXPECT_GT(predict(config, hardware).step_seconds, timeline.seconds) << schedule;
  }
  // Stages nearly alike: 1F1B of 8 stages and 8 micro-batches.
  EXPECT_NEAR(flop_timeline(base, step_work(base)).bubble, 7.0 / 15, 0.03);
}

TEST(Prediction, NothingGetsSlowerOnBetterHardware) {
  const PublishedRun far{"mula-220b-a10b", 12288, 8, 48};  // experts over several nodes
  for (const RunConfig& config : {published_config(kPublished[0], "dp"), published_config(kPublished[2], "ep_aware"),
                                  published_config(far, "ep_aware", "alltoall")}) {
    const std::vector<RankWork> work = step_work(config);
    const Hardware hardware = hardware_named("aurora");
    const double before = optimus::predict(config, work, hardware).step_seconds;
    for (Rate Hardware::*rate :
         {&Hardware::matmul, &Hardware::grouped_matmul, &Hardware::attention, &Hardware::attention_backward,
          &Hardware::memory, &Hardware::node_bandwidth, &Hardware::network_bandwidth}) {
      Hardware better = hardware;
      (better.*rate).value *= 2;
      EXPECT_LE(optimus::predict(config, work, better).step_seconds, before * (1 + 1e-12)) << (hardware.*rate).source;
    }
    for (Rate Hardware::*cost : {&Hardware::launch, &Hardware::collective_start, &Hardware::node_latency,
                                 &Hardware::network_latency, &Hardware::grouped_rows}) {
      Hardware better = hardware;
      (better.*cost).value /= 2;
      EXPECT_LE(optimus::predict(config, work, better).step_seconds, before * (1 + 1e-12)) << (hardware.*cost).source;
    }
  }
}

TEST(Prediction, OneRankOnlyComputes) {
  const PublishedRun run{"mula-1b", 1, 1, 1};
  const Prediction prediction = predict(published_config(run, "ep_aware"), hardware_named("h200"));
  EXPECT_EQ(prediction.bubble, 0);
  EXPECT_EQ(prediction.hidden_seconds(), 0);
  for (const Part& part : prediction.parts) {
    EXPECT_EQ(part.name.find(" over "), std::string::npos) << part.name;
    EXPECT_NE(part.name, "reduction of gradients");
  }
  EXPECT_LT(prediction.mfu, 1);
  EXPECT_GT(prediction.mfu, 0.05);
}

TEST(Prediction, MoreMicroBatchesShrinkTheBubble) {
  RunConfig config = published_config(kPublished[2], "ep_aware");
  const Hardware hardware = hardware_named("aurora");
  const Prediction few = predict(config, hardware);
  config.train.global_batch *= 8;
  const Prediction many = predict(config, hardware);
  EXPECT_LT(many.bubble, 0.4 * few.bubble);
  EXPECT_GT(many.tokens_per_second, 1.5 * few.tokens_per_second);
}

TEST(Prediction, F32IsRefused) {
  RunConfig config = published_config(kPublished[0], "ep_aware");
  config.precision.compute = "f32";
  EXPECT_THROW(predict(config, hardware_named("h200")), Error);
}

// ---- links ----

TEST(Links, TwoDevicesOfANodeMeetWhatWasMeasured) {
  const Hardware hardware = hardware_named("h200");
  const Links links(hardware, make_mesh_shape(2, 1, 2), 0);
  const auto seconds = [&](double total) { return links.seconds({"ep", "all_gather", total / 2}); };
  EXPECT_NEAR(seconds(0x1p28), 557e-6, 0.05 * 557e-6);
  EXPECT_NEAR(seconds(0x1p12), 17e-6, 2e-6);
}

TEST(Links, ARingSharesItsNodesPorts) {
  Hardware hardware = hardware_named("aurora");
  hardware.collective_start.value = hardware.node_latency.value = hardware.network_latency.value = 1e-12;
  const Links links(hardware, make_mesh_shape(48, 1, 12), 0);  // dp: 4 nodes of 12; edp: one rank on each of them
  EXPECT_EQ(links.position("dp").ranks, 48);
  EXPECT_EQ(links.position("dp").nodes, 4);
  EXPECT_EQ(links.position("edp").nodes, 4);
  EXPECT_EQ(links.position("ep").nodes, 1);
  const double bytes = 1e9;
  EXPECT_NEAR(links.seconds({"edp", "all_gather", bytes}), bytes / hardware.network_bandwidth.value, 1e-6);
  EXPECT_NEAR(links.seconds({"dp", "all_gather", bytes}), bytes / hardware.node_bandwidth.value, 1e-6);
  EXPECT_NEAR(links.seconds({"dp", "all_reduce", 2 * bytes}), 2 * bytes / hardware.node_bandwidth.value, 1e-6);
}

TEST(Links, ExpertGroupsAcrossNodesAreFound) {
  const Hardware aurora = hardware_named("aurora");
  EXPECT_EQ(Links(aurora, make_mesh_shape(48, 1, 6), 0).position("ep").nodes, 1);
  EXPECT_EQ(Links(aurora, make_mesh_shape(48, 1, 8), 0).position("ep").nodes, 2);
  EXPECT_EQ(Links(aurora, make_mesh_shape(48, 1, 24), 0).position("ep").nodes, 2);
  EXPECT_EQ(Links(aurora, make_mesh_shape(20, 2, 10), 0).position("ep").nodes, 1);   // 0..9
  EXPECT_EQ(Links(aurora, make_mesh_shape(20, 2, 10), 10).position("ep").nodes, 2);  // 10..19
}

TEST(Links, LatencyOfLargeGroupsGrowsWithTheLogarithm) {
  const Hardware hardware = hardware_named("aurora");
  const Links small(hardware, make_mesh_shape(12 * 16, 1, 12), 0), large(hardware, make_mesh_shape(12 * 256, 1, 12), 0);
  const double step = hardware.network_latency.value;
  EXPECT_NEAR(large.seconds({"edp", "all_gather", 8}) - small.seconds({"edp", "all_gather", 8}), 4 * step, 1e-8);
}

}  // namespace
}  // namespace optimus::test
