// The published models: parameter counts to the digit, and the FLOP formula against what the step really multiplies.
#include <gtest/gtest.h>

#include "optimus/base/file.h"
#include "support/tiny_model.h"

namespace optimus::test {
namespace {

int64_t parameters_of(const std::string& preset) {
  return whole_table(load_config(OPTIMUS_SOURCE_DIR "/configs/" + preset + ".toml", {}, ConfigUse::shape).model)
      .count();
}

TEST(Mula, ParameterCounts) {
  EXPECT_EQ(parameters_of("mula-1b"), 1279787008);
  EXPECT_EQ(parameters_of("mula-7b-a1b"), 6919161856);
  EXPECT_EQ(parameters_of("mula-20b-a2b"), 20076824576);
  EXPECT_EQ(parameters_of("mula-100b-a7b"), 99987557376);
  EXPECT_EQ(parameters_of("mula-220b-a10b"), 220205681664);
}

// The formula counts 6 FLOPs a matmul parameter and half of attention's square; the step's own products must agree.
void expect_formula(const std::string& path, const std::vector<std::string>& overrides) {
  const RunConfig config = load_config(path, overrides, ConfigUse::shape);
  const double counted = plan_engine(config, EngineUse::train).step_flops / double(config.tokens_per_step());
  EXPECT_NEAR(counted / flops_per_token(config.model), 1.0, 0.005) << path;
}

TEST(Mula, FlopsOfAStep) {
  const std::string folder = OPTIMUS_SOURCE_DIR "/configs/";
  expect_formula(folder + "mula-1b.toml", {"train.global_batch=2"});
  expect_formula(folder + "mula-7b-a1b.toml", {"train.global_batch=2"});
  expect_formula(folder + "mula-220b-a10b.toml", {"train.global_batch=4", "train.micro_batch=1"});
  expect_formula(folder + "quickstart.toml",
                 {"model.kv_heads=2", "model.moe.shared_experts=2", "model.moe.first_dense_layers=1"});
}

}  // namespace
}  // namespace optimus::test
