#include "optimus/data/loader.h"

#include <gtest/gtest.h>

#include "data/fixtures.h"

namespace optimus {
namespace {

constexpr int64_t kSequence = 8, kVocab = 5000;

/// Two files whose ids tell where they are from: file f, token i is 1000 f + i. 12 and 7 windows, and a tail each.
class LoaderTest : public ::testing::Test {
 protected:
  LoaderTest() {
    for (int f = 0; f < 2; ++f) {
      std::vector<uint16_t> ids;
      for (int i = 0; i < (f == 0 ? 99 : 60); ++i) ids.push_back(uint16_t(1000 * f + i));
      write_bytes(path(f), bytes_of(ids));
      config_.train.push_back({path(f), {}});
      config_.valid.push_back({path(f), {}});
    }
  }
  std::string path(int f) const { return folder_ / fmt::format("{}.u16", f); }

  TemporaryFolder folder_;
  DataConfig config_;
  BatchPart part_{.sequence = kSequence, .vocab = kVocab, .global_batch = 6, .first = 0, .count = 6};
};

void expect_equal(const HostBatch& a, const HostBatch& b) {
  EXPECT_EQ(a.sequences, b.sequences);
  EXPECT_EQ(a.sequence_length, b.sequence_length);
  EXPECT_EQ(a.tokens, b.tokens);
  EXPECT_EQ(a.targets, b.targets);
  EXPECT_EQ(a.positions, b.positions);
  EXPECT_EQ(a.weights, b.weights);
}

TEST(NextTokenBatch, PredictsInsideTheWindow) {
  const HostBatch batch = next_token_batch({5, 6, 7, 8, 9, 10}, 3);
  EXPECT_EQ(batch.sequences, 2);
  EXPECT_EQ(batch.targets, (std::vector<int32_t>{6, 7, 0, 9, 10, 0}));
  EXPECT_EQ(batch.positions, (std::vector<int32_t>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(batch.weights, (std::vector<float>{1, 1, 0, 1, 1, 0}));
}

TEST_F(LoaderTest, BatchIsTheSamplersWindows) {
  const Loader loader(config_, part_, 9);
  EXPECT_EQ(loader.windows(), 19);
  const Sampler sampler({12, 7}, {}, 9, true);
  for (int64_t step = 0; step < 20; ++step) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < 6; ++i) {
      const Window window = sampler.at(step * 6 + i);
      const int64_t first = 1000 * window.source + window.index * kSequence;
      for (int64_t t = 0; t < kSequence; ++t) tokens.push_back(int32_t(first + t));
    }
    expect_equal(loader.batch(step), next_token_batch(tokens, kSequence));
  }
}

TEST_F(LoaderTest, RanksReadTheirPartOfTheSameBatch) {
  const HostBatch whole = Loader(config_, part_, 9).batch(4);
  std::vector<int32_t> tokens;
  for (int64_t rank = 0; rank < 3; ++rank) {
    part_.first = rank * 2, part_.count = 2;
    const HostBatch part = Loader(config_, part_, 9).batch(4);
    tokens.insert(tokens.end(), part.tokens.begin(), part.tokens.end());
  }
  EXPECT_EQ(tokens, whole.tokens);
}

TEST_F(LoaderTest, TheSectionsSeedGoesBeforeTheDefault) {
  const std::vector<int32_t> tokens = Loader(config_, part_, 9).batch(0).tokens;
  EXPECT_NE(Loader(config_, part_, 10).batch(0).tokens, tokens);
  config_.seed = 9;
  EXPECT_EQ(Loader(config_, part_, 10).batch(0).tokens, tokens);
}

TEST_F(LoaderTest, NextEqualsBatchInOrderAndAfterJumps) {
  Loader loader(config_, part_, 9);
  for (const int64_t step : {0, 1, 2, 3, 4, 5, 6, 100, 101, 3, 3, 4, 0})
    expect_equal(loader.next(step), loader.batch(step));
}

TEST_F(LoaderTest, EndsCleanlyWhateverTheThreadDoes) {
  for (int i = 0; i < 50; ++i) {
    Loader loader(config_, part_, 9);
    for (int64_t step = 0; step < i % 4; ++step) loader.next(step);
  }
}

TEST_F(LoaderTest, ErrorsOfTheThreadReachTheCallerAtTheirStep) {
  config_.shuffle = false;
  part_.vocab = 1008;  // of file 1 only window 0 is good: windows 0 to 12 are, and window 13 is in step 2
  Loader loader(config_, part_, 9);
  loader.next(0);
  loader.next(1);
  for (int repeat = 0; repeat < 2; ++repeat)
    expect_error(ErrorKind::kData, {path(1), "token 1008 at byte 16 ", "vocabulary of 1008"}, [&] { loader.next(2); });
  expect_equal(loader.next(0), loader.batch(0));
}

TEST_F(LoaderTest, MixesByWeight) {
  config_.train[0].weight = 1.0;
  expect_error(ErrorKind::kUsage, {"1 of its 2 sources"}, [&] { Loader(config_, part_, 9); });
  config_.train[1].weight = 3.0;
  const Loader loader(config_, part_, 9);
  int64_t second = 0;
  for (int64_t step = 0; step < 40; ++step)
    for (int64_t i = 0; i < 6; ++i) second += loader.batch(step).tokens[size_t(i * kSequence)] >= 1000;
  EXPECT_NEAR(double(second), 180, 2);
}

TEST_F(LoaderTest, MissingAndShortData) {
  DataConfig missing;
  expect_error(ErrorKind::kUsage, {"data.train is missing"}, [&] { Loader(missing, part_, 1); });
  expect_error(ErrorKind::kUsage, {"data.valid is missing"}, [&] { EvalWindows(missing, kSequence, kVocab, 0); });
  part_.sequence = 100;
  expect_error(ErrorKind::kData, {"data.train", path(0) + " has 99 tokens", path(1) + " has 60 tokens", "= 100"},
               [&] { Loader(config_, part_, 1); });
  expect_error(ErrorKind::kData, {"data.valid", path(0) + " has 99 tokens", "= 100"},
               [&] { EvalWindows(config_, 100, kVocab, 0); });
  part_.sequence = 70;
  EXPECT_EQ(Loader(config_, part_, 1).windows(), 1) << "a short file beside a long one";
  config_.train[0].weight = config_.train[1].weight = 1.0;
  expect_error(ErrorKind::kData, {path(1) + " has 60 tokens", "weight"}, [&] { Loader(config_, part_, 1); });
}

TEST_F(LoaderTest, EvaluatesTheFirstWindowsInOrder) {
  EXPECT_EQ(EvalWindows(config_, kSequence, kVocab, 0).windows(), 19);
  EXPECT_EQ(EvalWindows(config_, kSequence, kVocab, 5).windows(), 5);
  EXPECT_EQ(EvalWindows(config_, kSequence, kVocab, 50).windows(), 19);
  const EvalWindows windows(config_, kSequence, kVocab, 0);
  std::vector<int32_t> expected;
  for (int32_t i = 88; i < 96; ++i) expected.push_back(i);
  for (int32_t i = 1000; i < 1016; ++i) expected.push_back(i);
  expect_equal(windows.batch(11, 3), next_token_batch(expected, kSequence));
  EXPECT_THROW(windows.batch(18, 2), std::logic_error);
  config_.valid[0].weight = 1.0;
  expect_error(ErrorKind::kUsage, {path(0), "weight"}, [&] { EvalWindows(config_, kSequence, kVocab, 0); });
}

}  // namespace
}  // namespace optimus
