#include "optimus/data/sampler.h"

#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "data/fixtures.h"
#include "optimus/data/permutation.h"

namespace optimus {
namespace {

TEST(Permutation, IsABijection) {
  for (const int64_t size : {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1000, 4096, 4097, 65537, 1000003}) {
    const Permutation permutation(size, philox_for(7, "test"), 3);
    std::vector<bool> seen(static_cast<size_t>(size));
    for (int64_t i = 0; i < size; ++i) {
      const int64_t image = permutation(i);
      ASSERT_TRUE(image >= 0 && image < size && !seen[size_t(image)]) << i << " of " << size;
      seen[size_t(image)] = true;
    }
  }
}

TEST(Permutation, HugeSizes) {
  for (const int64_t size : {int64_t(1) << 40, (int64_t(1) << 62) + 1}) {
    const Permutation permutation(size, philox_for(7, "test"), 0);
    std::set<int64_t> images;
    for (int64_t i = 0; i < 1000; ++i) images.insert(permutation(size - 1 - i));
    EXPECT_EQ(images.size(), 1000u);
    EXPECT_GE(*images.begin(), 0);
    EXPECT_LT(*images.rbegin(), size);
  }
}

/// Pearson's statistic of where item 0 goes, over many streams; 4.5 standard deviations above its mean.
TEST(Permutation, PlacesAreUniform) {
  for (const int64_t size : {3, 5, 24, 100}) {
    const int64_t draws = 20000;
    std::vector<int64_t> counts(static_cast<size_t>(size));
    for (int64_t stream = 0; stream < draws; ++stream)
      ++counts[size_t(Permutation(size, philox_for(1, "test"), uint64_t(stream))(0))];
    const double expected = double(draws) / double(size), degrees = double(size - 1);
    double statistic = 0;
    for (const int64_t count : counts) statistic += (double(count) - expected) * (double(count) - expected) / expected;
    EXPECT_LT(statistic, degrees + 4.5 * std::sqrt(2 * degrees)) << size;
  }
}

/// Neighbours must not stay neighbours: the mean distance of uniform pairs is a third of the size.
TEST(Permutation, NeighboursPart) {
  const int64_t size = 10000;
  const Permutation permutation(size, philox_for(1, "test"), 0);
  double distance = 0;
  for (int64_t i = 0; i + 1 < size; ++i) distance += double(std::abs(permutation(i + 1) - permutation(i)));
  EXPECT_NEAR(distance / double(size - 1), double(size) / 3, 100);
}

std::vector<Window> draw(const Sampler& sampler, int64_t begin, int64_t count) {
  std::vector<Window> windows;
  for (int64_t n = begin; n < begin + count; ++n) windows.push_back(sampler.at(n));
  return windows;
}

std::set<std::pair<int64_t, int64_t>> distinct(const std::vector<Window>& windows) {
  std::set<std::pair<int64_t, int64_t>> set;
  for (const Window& window : windows) set.emplace(window.source, window.index);
  return set;
}

TEST(Sampler, AnEpochHoldsEveryWindowOnceAndEpochsDiffer) {
  const std::vector<int64_t> counts{5, 0, 101, 1};
  const Sampler sampler(counts, {}, 42, true);
  std::vector<std::vector<Window>> epochs;
  for (int64_t epoch = 0; epoch < 5; ++epoch) {
    epochs.push_back(draw(sampler, epoch * 107, 107));
    EXPECT_EQ(distinct(epochs.back()).size(), 107u);
    for (const Window& window : epochs.back()) EXPECT_LT(window.index, counts[size_t(window.source)]);
    for (int64_t other = 0; other < epoch; ++other) EXPECT_NE(epochs[size_t(other)], epochs.back());
  }
}

TEST(Sampler, SeedDecidesTheOrder) {
  const auto order = [](uint64_t seed) { return draw(Sampler({100}, {}, seed, true), 0, 100); };
  EXPECT_EQ(order(1), order(1));
  EXPECT_NE(order(1), order(2));
}

TEST(Sampler, UnshuffledKeepsTheOrderOfTheFiles) {
  const Sampler sampler({2, 0, 3}, {}, 1, false);
  const std::vector<Window> epoch{{0, 0}, {0, 1}, {2, 0}, {2, 1}, {2, 2}};
  EXPECT_EQ(draw(sampler, 0, 5), epoch);
  EXPECT_EQ(draw(sampler, 5, 5), epoch);
}

/// Draws of each source so far, checked at every block bound and, looser, at every sample.
void expect_proportions(const std::vector<double>& weights, int64_t samples) {
  const Sampler sampler(std::vector<int64_t>(weights.size(), 50), weights, 3, true);
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<int64_t> counts(weights.size());
  for (int64_t n = 0; n < samples; ++n) {
    ++counts[size_t(sampler.at(n).source)];
    const bool bound = (n + 1) % sampler.block() == 0;
    for (size_t s = 0; s < weights.size(); ++s)
      ASSERT_NEAR(double(counts[s]), double(n + 1) * weights[s] / total, bound ? 1.0 : 1.0 + double(weights.size()))
          << "source " << s << " after " << n + 1;
  }
}

TEST(Sampler, WeightsAreKept) {
  expect_proportions({1}, 10000);
  expect_proportions({0.7, 0.3}, 40000);
  expect_proportions({1, 1, 1}, 40000);
  expect_proportions({5, 0.01, 2, 2.99, 0.001}, 80000);
  expect_proportions({0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625, 0.0625, 0.0625}, 40000);
}

TEST(Sampler, RareSourcesComeInTheirTurn) {
  const std::vector<double> weights{1, 1e-5, 1, 1e-5};
  const Sampler sampler({10, 10, 10, 10}, weights, 3, true);
  EXPECT_EQ(sampler.block(), 262144) << "the power of two that holds one of the rarest source";
  for (int64_t block = 0; block < 3; ++block) {
    std::vector<int64_t> counts(4);
    for (const Window& window : draw(sampler, block * sampler.block(), sampler.block()))
      ++counts[size_t(window.source)];
    for (const int64_t rare : {1, 3}) EXPECT_TRUE(counts[size_t(rare)] == 1 || counts[size_t(rare)] == 2);
  }
  expect_error(ErrorKind::kUsage, {"source 1", "1e-12"}, [] { Sampler({1, 1}, {1, 1e-12}, 1, true); });
}

TEST(Sampler, NoWindowOfAWeightedSourceRepeatsWithinItsEpoch) {
  const std::vector<int64_t> counts{7, 3001, 100};
  const Sampler sampler(counts, {0.2, 0.5, 0.3}, 11, true);
  std::vector<std::vector<int64_t>> drawn(counts.size());
  for (const Window& window : draw(sampler, 0, 20000)) drawn[size_t(window.source)].push_back(window.index);
  for (size_t s = 0; s < counts.size(); ++s) {
    const auto count = counts[s];
    std::vector<std::vector<int64_t>> epochs;
    for (size_t begin = 0; begin + size_t(count) <= drawn[s].size(); begin += size_t(count)) {
      epochs.emplace_back(drawn[s].begin() + int64_t(begin), drawn[s].begin() + int64_t(begin) + count);
      std::vector<int64_t> sorted = epochs.back();
      std::ranges::sort(sorted);
      for (int64_t i = 0; i < count; ++i)
        ASSERT_EQ(sorted[size_t(i)], i) << "source " << s << " epoch " << epochs.size();
    }
    ASSERT_GE(epochs.size(), 2u);
    EXPECT_NE(epochs[0], epochs[1]);
  }
}

TEST(Sampler, WeightedAndUnshuffledReadsEachSourceInOrder) {
  const Sampler sampler({3, 100}, {1, 3}, 1, false);
  std::vector<int64_t> next(2);
  for (const Window& window : draw(sampler, 0, 10000)) {
    ASSERT_EQ(window.index, next[size_t(window.source)]);
    next[size_t(window.source)] = (window.index + 1) % (window.source == 0 ? 3 : 100);
  }
}

}  // namespace
}  // namespace optimus
