// State through checkpoints on one rank, for all ways that weights and moments are kept.
#include "optimus/train/run_state.h"

#include <bit>

#include <gtest/gtest.h>

#include "optimus/base/json.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace optimus::test {
namespace {

struct Precision {
  const char *compute, *moments;
};
const std::vector<Precision> kPrecisions = {{"f32", "f32"}, {"f32", "bf16"}, {"bf16", "f32"}, {"bf16", "bf16"}};

RunConfig config_for(const Precision& precision, const std::vector<std::string>& more = {}) {
  std::vector<std::string> overrides{fmt::format("precision.compute={}", precision.compute),
                                     fmt::format("precision.moments={}", precision.moments), "optimizer.lr=1e-2"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  return config_of(kTinyMoe, overrides);
}

void save(TestRun& run, const fs::path& folder, int64_t step) {
  save_state(*run.engine, folder, step, section_to_json(run.engine->config()), {}, *make_single_process());
}
void load(TestRun& run, const fs::path& folder) {
  Checkpoint checkpoint(folder);
  load_state(*run.engine, checkpoint, *make_single_process());
}
std::vector<double> losses(TestRun& run, int64_t begin, int64_t end) {
  std::vector<double> out;
  for (int64_t step = begin; step < end; ++step) {
    run.engine->step(step, random_batch(run.engine->config(), uint64_t(step)));
    out.push_back(run.engine->result_wait().loss);
  }
  return out;
}
std::vector<std::vector<float>> moments(TestRun& run) {
  std::vector<std::vector<float>> out;
  for (const FlatState& state : run.engine->moments()) out.push_back(read_floats_wait(*run.device, state.buffer));
  return out;
}

TEST(Tuning, ComesFromTheManifestAsAText) {
  const testing::TemporaryFolder folder;
  TestRun run(config_of(kTinyMoe));
  const auto saved_with = [&](const char* name, const nlohmann::json& tuning) {
    nlohmann::json sections = section_to_json(run.engine->config());
    if (!tuning.is_discarded()) sections["tuning"] = tuning;
    save_state(*run.engine, folder.path() / name, 1, sections, {}, *make_single_process());
    return Checkpoint(folder.path() / name);
  };
  EXPECT_EQ(tuning_of(saved_with("none", nlohmann::json::value_t::discarded)), "");
  EXPECT_EQ(tuning_of(saved_with("text", "a table")), "a table");
  for (const nlohmann::json& wrong : {nlohmann::json(5), nlohmann::json(), nlohmann::json{{"for", "x"}}}) {
    try {
      tuning_of(saved_with(fmt::format("wrong {}", wrong.type_name()).c_str(), wrong));
      ADD_FAILURE() << wrong.dump();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kData);
      EXPECT_NE(std::string(error.what()).find("config.tuning"), std::string::npos);
    }
  }
}

class RunState : public ::testing::TestWithParam<Precision> {};
INSTANTIATE_TEST_SUITE_P(All, RunState, ::testing::ValuesIn(kPrecisions), [](const auto& info) {
  return fmt::format("{}_moments_{}", info.param.compute, info.param.moments);
});

TEST_P(RunState, ACheckpointHoldsEveryBit) {
  const testing::TemporaryFolder folder;
  const RunConfig config = config_for(GetParam());
  TestRun run(config), resumed(config_for(GetParam(), {"train.seed=77"}));  // other weights until it loads
  losses(run, 0, 4);
  save(run, folder.path() / "4", 4);
  load(resumed, folder.path() / "4");
  EXPECT_EQ(resumed.weights(), run.weights());
  EXPECT_EQ(moments(resumed), moments(run));
}

TEST_P(RunState, ResumingChangesNoLoss) {
  const testing::TemporaryFolder folder;
  const RunConfig config = config_for(GetParam());
  TestRun run(config), resumed(config);
  losses(run, 0, 3);
  save(run, folder.path() / "3", 3);
  load(resumed, folder.path() / "3");
  EXPECT_EQ(losses(resumed, 3, 8), losses(run, 3, 8));
  EXPECT_EQ(resumed.weights(), run.weights());
  EXPECT_EQ(moments(resumed), moments(run));
}

TEST_P(RunState, TensorsHaveTheTypesOfTheRun) {
  const testing::TemporaryFolder folder;
  TestRun run(config_for(GetParam()));
  losses(run, 0, 2);
  save(run, folder.path() / "2", 2);
  const Checkpoint checkpoint(folder.path() / "2");
  const DType of_moments = run.engine->config().moment_dtype();
  for (const auto& [name, record] : checkpoint.manifest().tensors)
    EXPECT_EQ(record.dtype, name.starts_with("m.") || name.starts_with("v.") ? of_moments : DType::f32) << name;
}

// Master weights are the same f32 numbers whatever the weights' type; moments are rounded once where they get narrower.
TEST_P(RunState, AnyPrecisionLoadsAnyOther) {
  const testing::TemporaryFolder folder;
  TestRun from(config_for(GetParam()));
  losses(from, 0, 3);
  save(from, folder.path() / "3", 3);
  for (const Precision& precision : kPrecisions) {
    SCOPED_TRACE(fmt::format("compute {} moments {}", precision.compute, precision.moments));
    TestRun to(config_for(precision));
    load(to, folder.path() / "3");
    EXPECT_EQ(to.weights(), from.weights());
    std::vector<std::vector<float>> expected = moments(from);
    if (std::string(precision.moments) == "bf16")
      for (std::vector<float>& moment : expected)
        for (float& value : moment) value = float(bf16(value));
    EXPECT_EQ(moments(to), expected);
    for (double loss : losses(to, 3, 6)) EXPECT_TRUE(std::isfinite(loss));
  }
}

TEST(RunStateInitial, MasterWeightsDoNotDependOnThePrecision) {
  TestRun f32(config_for(kPrecisions[0])), narrow(config_for(kPrecisions[3]));
  EXPECT_EQ(narrow.weights(), f32.weights());
}

// More elements than move at once.
TEST(RunStateInitial, PiecesMakeTheWhole) {
  const testing::TemporaryFolder folder;
  const std::vector<std::string> large{"model.vocab=45000"};
  TestRun f32(config_for(kPrecisions[0], large)), narrow(config_for(kPrecisions[3], large));
  EXPECT_EQ(narrow.weights(), f32.weights());
  losses(narrow, 0, 1);
  save(narrow, folder.path() / "1", 1);
  load(f32, folder.path() / "1");
  EXPECT_EQ(narrow.weights(), f32.weights());
}

// The compute weights are the master weights rounded to the nearest.
TEST_P(RunState, ComputeWeightsFollowTheMaster) {
  TestRun run(config_for(GetParam()));
  losses(run, 0, 3);
  run.engine->weights_wait();
  const std::vector<float> masters = run.weights(), weights = read_floats_wait(*run.device, run.engine->weights());
  const bool narrow = run.engine->config().compute_dtype() == DType::bf16;
  for (size_t i = 0; i < masters.size(); ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(masters[i]);
    EXPECT_EQ(weights[i], narrow ? std::bit_cast<float>((bits + 0x8000u) & 0xFFFF0000u) : masters[i]) << i;
  }
}

TEST(Moments, Bf16FollowsF32) {
  TestRun a(config_for({"f32", "f32"})), b(config_for({"f32", "bf16"}));
  for (int64_t step = 0; step < 30; ++step) {
    const HostBatch batch = random_batch(a.engine->config(), uint64_t(step % 4));
    a.engine->step(step, batch);
    b.engine->step(step, batch);
    EXPECT_NEAR(b.engine->result_wait().loss / a.engine->result_wait().loss, 1, 2e-2) << step;
  }
  EXPECT_NE(a.weights(), b.weights());
}

}  // namespace
}  // namespace optimus::test
