#include "optimus/train/metrics.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "optimus/base/error.h"

namespace optimus {
namespace {

class MetricsFileTest : public testing::Test {
 protected:
  MetricsFileTest() : folder_(fs::temp_directory_path() / fmt::format("optimus-metrics-{}", getpid())) {
    fs::remove_all(folder_);
    make_folder(folder_);
  }
  ~MetricsFileTest() override { fs::remove_all(folder_); }

  fs::path path() const { return folder_ / "metrics.jsonl"; }
  void put(const std::string& text) const {
    OutputFile file(path());
    file.write(text);
    file.close();
  }

  fs::path folder_;
};

StepRecord record_of(int64_t step) {
  StepRecord record;
  record.step = step;
  record.loss = 1.0 / double(step);
  return record;
}

TEST(LayerLoad, UniformCountsArePerfectBalance) {
  const std::vector<double> counts(8, 5.0);
  const LayerLoad load = layer_load(3, counts);
  EXPECT_EQ(load.layer, 3);
  EXPECT_DOUBLE_EQ(load.max_over_mean, 1.0);
  EXPECT_DOUBLE_EQ(load.p95_over_mean, 1.0);
  EXPECT_NEAR(load.entropy, std::log(8.0), 1e-14);
  EXPECT_EQ(load.dead_experts, 0);
}

TEST(LayerLoad, OneExpertTakesAll) {
  const LayerLoad load = layer_load(0, std::array{0.0, 12.0, 0.0, 0.0});
  EXPECT_DOUBLE_EQ(load.max_over_mean, 4.0);
  EXPECT_DOUBLE_EQ(load.entropy, 0.0);
  EXPECT_EQ(load.dead_experts, 3);
}

TEST(LayerLoad, PercentileIsTheNearestRank) {
  std::vector<double> counts;  // 1 .. 40 in falling order; the rank is ceil(0.95 * 40) = 38
  for (int c = 40; c >= 1; --c) counts.push_back(c);
  EXPECT_DOUBLE_EQ(layer_load(0, counts).p95_over_mean, 38.0 / 20.5);
  counts.push_back(41.0);  // ceil(0.95 * 41) = 39
  EXPECT_DOUBLE_EQ(layer_load(0, counts).p95_over_mean, 39.0 / 21.0);
}

TEST(LayerLoad, NoSlotsGiveNumbersNotNaN) {
  const LayerLoad load = layer_load(0, std::array{0.0, 0.0});
  EXPECT_EQ(load, (LayerLoad{.layer = 0, .dead_experts = 2}));
  EXPECT_EQ(layer_load(1, {}), (LayerLoad{.layer = 1}));
}

TEST(StepRecord, JsonHasExactlyTheKeysOfTheContract) {
  StepRecord record = record_of(1);
  record.router.push_back(layer_load(2, std::array{1.0, 3.0}));
  const std::vector<std::string> expected{
      "balance_loss", "ce",   "grad_norm", "loss",         "lr",     "memory_peak_bytes", "mfu",
      "router",       "step", "tflops",    "step_seconds", "tokens", "tokens_per_second", "z_loss"};
  auto keys_of = [](const nlohmann::json& object) {
    std::set<std::string> keys;
    for (const auto& [key, value] : object.items()) keys.insert(key);
    return keys;
  };
  std::set<std::string> keys(expected.begin(), expected.end());
  const auto json = nlohmann::json::parse(to_json_line(record));
  EXPECT_EQ(keys_of(json), keys);
  EXPECT_EQ(keys_of(json.at("router").at(0)),
            (std::set<std::string>{"layer", "max_over_mean", "p95_over_mean", "entropy", "dead_experts"}));
  EXPECT_EQ(json.at("router").at(0).at("layer"), 2);

  record.valid_loss = 2.5;
  keys.insert("valid_loss");
  EXPECT_EQ(keys_of(nlohmann::json::parse(to_json_line(record))), keys);
}

TEST(StepRecord, DoublesParseBackExactly) {
  for (const double value : {0.1, 1.0 / 3.0, 5e-324, 1.7976931348623157e308, 4.0, 2.2250738585072014e-308, -0.0,
                             std::nextafter(10.0, 11.0), 123456789.123456789, 1e22, 9007199254740993.0}) {
    StepRecord record;
    record.loss = value;
    const auto parsed = nlohmann::json::parse(to_json_line(record)).at("loss").get<double>();
    EXPECT_EQ(std::bit_cast<uint64_t>(parsed), std::bit_cast<uint64_t>(value)) << value;
  }
}

TEST(StepRecord, WhatIsNotFiniteIsNull) {
  StepRecord record;
  record.loss = std::numeric_limits<double>::quiet_NaN();
  record.grad_norm = std::numeric_limits<double>::infinity();
  record.valid_loss = -std::numeric_limits<double>::infinity();
  const auto json = nlohmann::json::parse(to_json_line(record));
  EXPECT_TRUE(json.at("loss").is_null());
  EXPECT_TRUE(json.at("grad_norm").is_null());
  EXPECT_TRUE(json.at("valid_loss").is_null());
}

TEST_F(MetricsFileTest, AppendedLinesAreInTheFileAtOnce) {
  MetricsFile metrics(folder_);
  std::string expected;
  for (int64_t step = 1; step <= 3; ++step) {
    metrics.append(record_of(step));
    expected += to_json_line(record_of(step)) + "\n";
    EXPECT_EQ(read_text(path()), expected);  // the writer is still open: nothing is held back
  }
}

TEST_F(MetricsFileTest, ReopeningContinuesTheFile) {
  MetricsFile(folder_).append(record_of(1));
  MetricsFile(folder_).append(record_of(2));
  EXPECT_EQ(read_text(path()), to_json_line(record_of(1)) + "\n" + to_json_line(record_of(2)) + "\n");
}

TEST_F(MetricsFileTest, CutBackDropsLaterStepsAndGoesOn) {
  MetricsFile metrics(folder_);
  for (int64_t step = 10; step <= 50; step += 10) metrics.append(record_of(step));
  metrics.cut_back_to(30);
  metrics.append(record_of(31));
  std::string expected;
  for (int64_t step : {10, 20, 30, 31}) expected += to_json_line(record_of(step)) + "\n";
  EXPECT_EQ(read_text(path()), expected);
}

TEST_F(MetricsFileTest, CutBackDropsATornLineWhereverItIsTorn) {
  const std::string first = to_json_line(record_of(1)) + "\n", second = to_json_line(record_of(2));
  for (size_t torn = 1; torn <= second.size(); ++torn) {
    put(first + second.substr(0, torn));
    MetricsFile metrics(folder_);
    metrics.cut_back_to(100);
    EXPECT_EQ(read_text(path()), first) << "torn after " << torn << " bytes";
  }
}

TEST_F(MetricsFileTest, CutBackDropsLinesThatAreNoRecords) {
  const std::string good = to_json_line(record_of(1)) + "\n";
  put(std::string("\0\0\0\n", 4) + "{}\n[1]\n{\"step\": \"7\"}\n" + good + "{\"step\":1,\"lo{\"step\":2}\n\n");
  MetricsFile metrics(folder_);
  metrics.cut_back_to(100);
  EXPECT_EQ(read_text(path()), good);
}

TEST_F(MetricsFileTest, CutBackToZeroStartsAnew) {
  MetricsFile metrics(folder_);
  metrics.append(record_of(1));
  metrics.cut_back_to(0);
  EXPECT_EQ(read_text(path()), "");
  metrics.append(record_of(1));
  EXPECT_EQ(read_text(path()), to_json_line(record_of(1)) + "\n");
}

TEST(MetricsFile, AMissingFolderIsNamed) {
  try {
    MetricsFile metrics("/nonexistent/run");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kData);
    EXPECT_NE(std::string(error.what()).find("/nonexistent/run"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace optimus
