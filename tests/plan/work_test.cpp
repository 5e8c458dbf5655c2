// What a step's ranks do, against closed forms. X and N are the expert and the other parameters of a rank, dp and edp
// the ranks that hold the same N and the same X; bf16 weights and gradients, rings.
//
//              state, bytes            reduced and gathered, bytes                         updated
//   ep_aware   12 (X/edp + N/dp)       4 N (dp-1)/dp + 4 X (edp-1)/edp                     X/edp + N/dp
//   dp         12 (X + N)/edp          4 N (ep-1)/ep + 4 (X + N)(edp-1)/edp                (X + N)/edp
//
// Buckets are padded so that shards are equally long, which adds less than 2 %.
#include <gtest/gtest.h>

#include "optimus/parallel/dispatchers.h"
#include "optimus/parallel/placements.h"
#include "plan/layouts.h"

namespace optimus::test {
namespace {

constexpr double kPadding = 0.02;

struct Owned {
  double X = 0, N = 0;
};

Owned owned_by(const RunConfig& config, int rank) {
  ParameterTable table;
  std::vector<Stage> stages;
  for (const Placement& placement :
       placements_of(config.model, config.parallel, config.mesh, place_of(config.mesh, rank)))
    stages.emplace_back(config.model, placement, 1, table);
  Owned owned;
  for (const Parameter& row : table.rows())
    (row.cls == ParameterClass::expert ? owned.X : owned.N) += double(row.local.elements());
  return owned;
}

double bytes_of(const std::vector<MessageRecord>& messages) {
  double bytes = 0;
  for (const MessageRecord& message : messages) bytes += message.bytes;
  return bytes;
}

/// f32 m and v, the weight and its master's remainder are read and written, the gradient is read.
double updated_elements(const RankWork& rank) {
  double bytes = 0;
  for (const OpRecord& op : rank.update.ops) bytes += op.bytes;
  return bytes / 26;
}

void expect_padded(double actual, double exact, const std::string& what) {
  EXPECT_GE(actual, exact * (1 - 1e-9)) << what;
  EXPECT_LE(actual, exact * (1 + kPadding)) << what;
}

TEST(Work, OptimizerKeepsMovesAndUpdatesWhatTheClosedFormsSay) {
  for (const PublishedRun& run : kPublished)
    for (const char* sharding : {"ep_aware", "dp"}) {
      const RunConfig config = published_config(run, sharding);
      const std::vector<RankWork> ranks = step_work(config);
      const double dp = config.mesh.dp, edp = config.mesh.edp, ep = config.mesh.ep;
      for (int pp = 0; pp < config.mesh.pp; ++pp) {
        const std::string what = fmt::format("{} {} pp {}", run.model, sharding, pp);
        const int number = rank_of(config.mesh, pp, 0);
        const auto [X, N] = owned_by(config, number);
        const bool aware = sharding == std::string("ep_aware");
        const double state = aware ? X / edp + N / dp : (X + N) / edp;
        const double moved = aware ? 4 * N * (dp - 1) / dp + 4 * X * (edp - 1) / edp
                                   : 4 * N * (ep - 1) / ep + 4 * (X + N) * (edp - 1) / edp;

        std::map<std::string, int64_t> segments = plan_engine(config, EngineUse::train, number).segments;
        expect_padded(double(segments["master weights"] + segments["optimizer moments"]), 10 * state, what + " state");
        const RankWork& rank = ranks[size_t(pp)];
        expect_padded(bytes_of(rank.reductions) + bytes_of(rank.reduce.messages) + bytes_of(rank.gathers), moved,
                      what + " moved");
        expect_padded(updated_elements(rank), state, what + " updated");
      }
    }
}

TEST(Work, EpAwareShardingSavesUpdateWork) {
  for (const PublishedRun& run : kPublished) {
    const RunConfig config = published_config(run, "ep_aware");
    const std::vector<RankWork> aware = step_work(config), plain = step_work(published_config(run, "dp"));
    for (int pp = 0; pp < config.mesh.pp; ++pp) {
      const auto [X, N] = owned_by(config, rank_of(config.mesh, pp, 0));
      const double expected = (X + N) / (X + N / config.mesh.ep);
      EXPECT_NEAR(updated_elements(plain[size_t(pp)]) / updated_elements(aware[size_t(pp)]), expected, 0.02 * expected)
          << run.model << " pp " << pp;
    }
  }
}

TEST(Work, OnlyReductionsInBackwardAndGathersCanBeHidden) {
  for (const PublishedRun& run : kPublished) {
    const RankWork aware = step_work(published_config(run, "ep_aware"))[0];
    const RankWork plain = step_work(published_config(run, "dp"))[0];
    const RankWork none = step_work(published_config(run, "none"))[0];
    // What is reduced is gathered, bytes for bytes.
    EXPECT_DOUBLE_EQ(bytes_of(aware.gathers), bytes_of(aware.reductions));
    EXPECT_TRUE(aware.reduce.messages.empty());
    // SO sums over ep when all backwards are done; without sharding gradients are gathered, not weights.
    EXPECT_GT(bytes_of(plain.reduce.messages), 0);
    EXPECT_TRUE(none.gathers.empty());
    EXPECT_DOUBLE_EQ(bytes_of(none.reduce.messages), bytes_of(none.reductions));
  }
}

TEST(Work, DispatchersMoveWhatTheyShould) {
  const PublishedRun& run = kPublished[0];
  for (const char* dispatcher : {"allgather", "alltoall"}) {
    const RunConfig config = published_config(run, "ep_aware", dispatcher);
    double sent = 0;
    for (const Communication& entry : communication_of(config, step_work(config)))
      if (entry.group == "ep") sent += entry.bytes;
    // Hidden, forward and backward there and back, 32 layers of 2048 tokens, bf16: to 11 ranks, or to half of them.
    const double copies =
        dispatcher == std::string("allgather") ? 11 : 11 * destination_share(*config.model.moe, config.mesh.ep);
    const double hidden = copies * 4 * 32 * 2048.0 * 2048 * 2;
    EXPECT_GE(sent, 0.999 * hidden) << dispatcher;
    EXPECT_LE(sent, 1.02 * hidden) << dispatcher;  // gates and ids
  }
}

TEST(Work, RoutedRowsAreThoseOfBalancedExperts) {
  for (const char* dispatcher : {"allgather", "alltoall"}) {
    const RunConfig config = published_config(kPublished[0], "ep_aware", dispatcher);
    const ChunkWork chunk = step_work(config)[0].chunks[0];
    const double rows = 2048 * 8, width = 1024;
    double swiglu = 0, flops = 0;
    for (const OpRecord& op : chunk.forward.ops) {
      if (op.op == "swiglu") swiglu += op.bytes;
      if (op.op == "grouped_matmul") flops += op.flops;
    }
    EXPECT_DOUBLE_EQ(swiglu, 32 * rows * (3 * width * 2 + 4)) << dispatcher;
    EXPECT_DOUBLE_EQ(flops, 32 * rows * 3 * 2 * width * 2048) << dispatcher;
    for (const MessageRecord& message : chunk.forward.messages) EXPECT_GT(message.bytes, 0) << message.operation;
  }
}

TEST(Work, FlopsAreTheModels) {
  for (const char* schedule : {"1f1b", "zero_bubble", "interleaved"}) {
    RunConfig config = published_config(kPublished[1], "ep_aware");
    config.parallel.schedule = schedule;
    double flops = 0;
    for (const RankWork& rank : step_work(config))
      for (const ChunkWork& chunk : rank.chunks)
        flops += flops_of(chunk.forward) + flops_of(chunk.backward_input) + flops_of(chunk.backward_weight);
    const double expected = flops_per_token(config.model) * 2048;
    EXPECT_NEAR(flops / expected, 1, 1e-3) << schedule;
  }
}

TEST(Work, OneRankSendsNothing) {
  RunConfig config = published_config({"mula-7b-a1b", 1, 1, 1}, "ep_aware");
  EXPECT_TRUE(communication_of(config, step_work(config)).empty());
}

TEST(Work, MicroBatchesBeyondTheTracedOnesAreCounted) {
  const PublishedRun& run = kPublished[1];
  RunConfig config = published_config(run, "ep_aware");
  const auto sent = [&](const char* group) {
    double bytes = 0;
    for (const Communication& entry : communication_of(config, step_work(config)))
      if (entry.group == group) bytes += entry.bytes;
    return bytes;
  };
  const double ep = sent("ep"), pp = sent("pp"), edp = sent("edp");
  config.train.global_batch *= 4;
  EXPECT_DOUBLE_EQ(sent("ep"), 4 * ep);
  EXPECT_DOUBLE_EQ(sent("pp"), 4 * pp);
  EXPECT_DOUBLE_EQ(sent("edp"), edp);
}

}  // namespace
}  // namespace optimus::test
