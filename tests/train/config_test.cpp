// Configurations: defaults, learning-rate schedules, and what damage does to the parser.
#include "optimus/train/config.h"

#include <random>

#include <gtest/gtest.h>

#include "optimus/optim/schedule.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace optimus::test {
namespace {

constexpr const char* kMinimal = "[model]\nlayers = 2\nhidden = 64\nheads = 4\n[train]\nsteps = 1000\n";

TEST(Config, Defaults) {
  const RunConfig config = parse_config(kMinimal, "folder/my.toml", {}, ConfigUse::train);
  EXPECT_EQ(config.model.kv_heads, 4);
  EXPECT_EQ(config.model.head_dim, 16);
  EXPECT_EQ(config.model.mlp_width, 256);
  EXPECT_EQ(config.model.vocab, 257);
  EXPECT_EQ(config.model.sequence, 1024);
  EXPECT_FALSE(config.model.moe.has_value());
  EXPECT_EQ(config.train.global_batch, 32);
  EXPECT_EQ(config.train.micro_batch, 8);
  EXPECT_EQ(config.optimizer.lr, 4e-4);
  EXPECT_DOUBLE_EQ(*config.optimizer.min_lr, 4e-5);
  EXPECT_EQ(*config.optimizer.warmup_steps, 100);
  EXPECT_EQ(*config.optimizer.decay_steps, 1000);
  EXPECT_EQ(config.run.dir, "runs/my");
}

TEST(Config, OverridesAndTokens) {
  const RunConfig config = parse_config(
      kMinimal, "a.toml",
      {"train.steps=0", "train.tokens=1e6", "model.norm=layer", "data.train=[\"x\", {path=\"y\", weight=2}]"},
      ConfigUse::train);
  EXPECT_EQ(config.train.steps, 31) << "a million tokens in steps of 32 * 1024, rounded up";
  EXPECT_EQ(config.model.norm, "layer");
  ASSERT_EQ(config.data.train.size(), 2u);
  EXPECT_EQ(config.data.train[1].weight, 2.0);
}

TEST(Config, ResolvedTextReadsBackTheSame) {
  const RunConfig config = config_of(kTinyMoe);
  const std::string text = to_toml(config);
  EXPECT_EQ(to_toml(parse_config(text, "again.toml", {}, ConfigUse::shape)), text);
}

TEST(Config, LearningRates) {
  auto rate = [](const std::string& schedule, int64_t step) {
    return learning_rate(
        parse_config(kMinimal, "a.toml", {"optimizer.lr=1", "optimizer.min_lr=0.1", "optimizer.schedule=" + schedule},
                     ConfigUse::train)
            .optimizer,
        step);
  };
  for (const char* schedule : {"cosine", "linear", "wsd", "constant"}) {
    EXPECT_DOUBLE_EQ(rate(schedule, 0), 0.1) << "warm-up starts from min_lr";
    EXPECT_DOUBLE_EQ(rate(schedule, 50), 0.55);
    EXPECT_DOUBLE_EQ(rate(schedule, 100), 1.0);
  }
  EXPECT_NEAR(rate("cosine", 550), 0.55, 1e-12);
  EXPECT_DOUBLE_EQ(rate("cosine", 1000), 0.1);
  EXPECT_DOUBLE_EQ(rate("cosine", 5000), 0.1);
  EXPECT_NEAR(rate("linear", 325), 0.775, 1e-12);
  EXPECT_DOUBLE_EQ(rate("wsd", 900), 1.0);
  EXPECT_NEAR(rate("wsd", 950), 0.55, 1e-12);
  EXPECT_DOUBLE_EQ(rate("wsd", 1000), 0.1);
  EXPECT_DOUBLE_EQ(rate("constant", 5000), 1.0);
}

TEST(Config, DamageIsAnErrorNeverACrash) {
  std::mt19937 generator(5);
  int read = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::string text = testing::mutated(kTinyMoe, generator);
    try {
      parse_config(text, "damaged.toml", {}, ConfigUse::shape);
      ++read;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
      EXPECT_MENTIONS(std::string(error.what()), "damaged.toml");
    }
  }
  EXPECT_GT(read, 0) << "some mutations leave a valid file";
  EXPECT_LT(read, 1000);
}

}  // namespace
}  // namespace optimus::test
