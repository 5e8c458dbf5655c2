// Properties of a training step on one rank.
#include "optimus/train/engine.h"

#include <malloc.h>

#include <gtest/gtest.h>

#include "support/tiny_model.h"

namespace optimus::test {
namespace {

TEST(Engine, AStepRepeatedIsBitEqual) {
  const RunConfig config = config_of(kTinyMoe);
  TestRun a(config), b(config);
  for (int64_t step = 0; step < 5; ++step) {
    const HostBatch batch = random_batch(config, uint64_t(step));
    a.engine->step(step, batch);
    b.engine->step(step, batch);
    EXPECT_EQ(a.engine->result_wait().loss, b.engine->result_wait().loss);
  }
  EXPECT_EQ(a.weights(), b.weights());
  EXPECT_EQ(a.gradients(), b.gradients());
}

/// Where each tensor is an allocation of its own, filled with NaN, one that is read before it is written shows. A
/// memory checker sees the same but where a library writes in ways that the checker does not follow.
TEST(Engine, NothingIsReadBeforeItIsWritten) {
  for (const char* precision : {"f32", "bf16"}) {
    for (const char* unit : {"sequence", "global"}) {
      const RunConfig config =
          config_of(kTinyMoe, {fmt::format("precision.compute={}", precision), "train.micro_batch=2",
                               fmt::format("model.moe.balance_unit={}", unit)});
      const auto two_steps = [&](TestRun& run) {
        std::vector<double> out;
        for (int64_t step = 0; step < 2; ++step) {
          run.engine->step(step, random_batch(config, uint64_t(step)));
          const StepResult result = run.engine->result_wait();
          out.insert(out.end(), {result.loss, result.gradient_norm});
        }
        std::vector<int32_t> tokens = random_batch(config, 9).tokens;
        tokens.resize(size_t(2 * config.model.sequence));
        out.push_back(run.engine->evaluate_wait(next_token_batch(tokens, config.model.sequence)).loss);
        return out;
      };
      TestRun usual(config);
      const std::vector<double> expected = two_steps(usual);
      setenv("OPTIMUS_DEBUG_ARENA", "nan", 1);
      TestRun filled(config);
      const std::vector<double> results = two_steps(filled);
      unsetenv("OPTIMUS_DEBUG_ARENA");
      EXPECT_EQ(results, expected) << precision << " " << unit;
      EXPECT_EQ(filled.weights(), usual.weights()) << precision << " " << unit;
    }
  }
}

TEST(Engine, MicroBatchSizeIsNotSemantics) {
  for (const char* unit : {"sequence", "global"}) {
    const std::vector<std::string> base{fmt::format("model.moe.balance_unit={}", unit)};
    std::optional<StepResult> expected;
    std::vector<float> expected_gradients;
    for (int size : {4, 2, 1}) {
      std::vector<std::string> overrides = base;
      overrides.push_back(fmt::format("train.micro_batch={}", size));
      const RunConfig config = config_of(kTinyMoe, overrides);
      TestRun run(config);
      run.engine->step(0, random_batch(config, 1));
      const StepResult result = run.engine->result_wait();
      if (!expected) {
        expected = result;
        expected_gradients = run.gradients();
        EXPECT_GT(result.balance_loss, 0);
        continue;
      }
      EXPECT_NEAR(result.loss / expected->loss, 1, 1e-6);
      EXPECT_NEAR(result.balance_loss / expected->balance_loss, 1, 1e-6);
      EXPECT_NEAR(result.z_loss / expected->z_loss, 1, 1e-6);
      EXPECT_EQ(result.expert_counts, expected->expert_counts);
      EXPECT_LT(relative_difference(run.gradients(), expected_gradients), 5e-6) << unit << " " << size;
    }
  }
}

TEST(Engine, PlanIsThePeak) {
  for (const char* precision : {"f32", "bf16"}) {
    const RunConfig config =
        config_of(kTinyMoe, {fmt::format("precision.compute={}", precision), "train.micro_batch=2"});
    const EnginePlan plan = plan_engine(config, EngineUse::train);
    TestRun run(config);
    for (int64_t step = 0; step < 3; ++step) run.engine->step(step, random_batch(config, uint64_t(step)));
    HostBatch batch = random_batch(config, 9);
    EXPECT_EQ(run.engine->peak_bytes(), plan.memory.total());
    int64_t named = 0;
    for (const auto& [name, bytes] : plan.segments) named += bytes;
    EXPECT_EQ(named, plan.memory.total());
  }
}

TEST(Engine, NothingIsAllocatedAsStepsGoOn) {
  const RunConfig config = config_of(kTinyMoe);
  TestRun run(config);
  size_t at_step_5 = 0;
  for (int64_t step = 0; step < 500; ++step) {
    run.engine->step(step, random_batch(config, uint64_t(step)));
    run.engine->result_wait();
    if (step == 4) at_step_5 = mallinfo2().uordblks;
  }
  EXPECT_EQ(mallinfo2().uordblks, at_step_5);
}

TEST(Engine, UniformRoutingBalancesAtTopK) {
  // A router of zeros is uniform: every probability 1/E, so the loss is exactly K (1 when divided by K).
  for (bool divide : {false, true}) {
    const RunConfig config =
        config_of(kTinyMoe, {"model.init_std=0", "model.moe.first_dense_layers=0", "model.layers=1",
                             fmt::format("model.moe.balance_divide_by_k={}", divide)});
    TestRun run(config);
    run.engine->step(0, random_batch(config, 1));
    EXPECT_NEAR(run.engine->result_wait().balance_loss, divide ? 1 : 2, 1e-6);
  }
}

TEST(Engine, EvaluationLeavesTrainingAlone) {
  const RunConfig config = config_of(kTinyMoe, {"model.moe.balance_unit=global"});
  TestRun plain(config), evaluated(config);
  for (int64_t step = 0; step < 3; ++step) {
    const HostBatch batch = random_batch(config, uint64_t(step));
    plain.engine->step(step, batch);
    evaluated.engine->step(step, batch);
    evaluated.engine->evaluate_wait(random_batch(config, 100));
  }
  EXPECT_EQ(plain.weights(), evaluated.weights());
}

TEST(Engine, NotFiniteNeverReachesTheWeights) {
  const RunConfig config = config_of(kTinyMoe);
  TestRun run(config);
  run.engine->step(0, random_batch(config, 1));
  std::vector<float> weights = run.weights();
  weights[5] = std::numeric_limits<float>::quiet_NaN();  // an embedding row: the batch's own tokens
  for (int32_t token = 0; token < 40; ++token) weights[size_t(token * 24)] = std::numeric_limits<float>::infinity();
  run.device->from_host(run.engine->weights(), weights.data());
  const std::vector<float> moments = read_floats_wait(*run.device, run.engine->moments()[0].buffer);
  run.engine->step(1, random_batch(config, 2));
  EXPECT_FALSE(run.engine->result_wait().finite);
  const std::vector<float> after = run.weights();
  EXPECT_EQ(std::memcmp(after.data(), weights.data(), weights.size() * sizeof(float)), 0);
  EXPECT_EQ(read_floats_wait(*run.device, run.engine->moments()[0].buffer), moments);
}

TEST(Engine, Bf16FollowsF32) {
  const RunConfig f32 = config_of(kTinyMoe, {"optimizer.lr=1e-2"});
  const RunConfig bf16 = config_of(kTinyMoe, {"optimizer.lr=1e-2", "precision.compute=bf16"});
  TestRun a(f32), b(bf16);
  for (int64_t step = 0; step < 20; ++step) {
    const HostBatch batch = random_batch(f32, uint64_t(step % 4));
    a.engine->step(step, batch);
    b.engine->step(step, batch);
    EXPECT_NEAR(b.engine->result_wait().loss / a.engine->result_wait().loss, 1, 2e-2) << step;
  }
}

TEST(Engine, ReportedNormIsThatOfEveryGradientBeforeClipping) {
  const RunConfig config = config_of(kTinyMoe, {"optimizer.clip_norm=0.1"});
  TestRun run(config);
  run.engine->step(0, random_batch(config, 1));
  double squares = 0;
  for (float g : run.gradients()) squares += double(g) * double(g);
  EXPECT_NEAR(run.engine->result_wait().gradient_norm, std::sqrt(squares), 1e-5 * std::sqrt(squares));
}

TEST(Engine, CachedDecodingEqualsTheWholeSequence) {
  const RunConfig config = config_of(kTinyMoe, {"train.global_batch=1"});
  TestRun whole(config, EngineUse::evaluation), cached(config, EngineUse::generation);
  const HostBatch batch = random_batch(config, 3);
  std::vector<float> expected;
  whole.engine->evaluate_wait(batch, [&](int64_t, Tensor logits) {
    const std::vector<float> rows = read_floats_wait(*whole.device, logits);
    expected.insert(expected.end(), rows.begin(), rows.end());
  });
  const int64_t vocab = config.model.vocab;
  int64_t done = 0;
  for (int64_t count : {5, 1, 1, 3, 2}) {
    const std::vector<int32_t> tokens(batch.tokens.begin() + done, batch.tokens.begin() + done + count);
    const std::vector<float> logits = cached.engine->decode_wait(tokens);
    done += count;
    const std::vector<float> row(expected.begin() + (done - 1) * vocab, expected.begin() + done * vocab);
    EXPECT_LT(relative_difference(logits, row), 1e-5) << "after " << done << " tokens";
  }
}

}  // namespace
}  // namespace optimus::test
