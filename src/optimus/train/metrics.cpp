#include "optimus/train/metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>

#include <nlohmann/json.hpp>

namespace optimus {
namespace {

using Json = nlohmann::ordered_json;  // keys in the order they are set; dump() writes null for NaN and infinities

Json to_json(const LayerLoad& load) {
  return {{"layer", load.layer},
          {"max_over_mean", load.max_over_mean},
          {"p95_over_mean", load.p95_over_mean},
          {"entropy", load.entropy},
          {"dead_experts", load.dead_experts}};
}

/// The step of a line that is a whole record; nothing for any other text.
std::optional<int64_t> step_of(std::string_view line) {
  const Json record = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!record.is_object()) return std::nullopt;
  const auto step = record.find("step");
  if (step == record.end() || !step->is_number_integer()) return std::nullopt;
  return step->get<int64_t>();
}

}  // namespace

LayerLoad layer_load(int64_t layer, std::span<const double> counts) {
  LayerLoad load{.layer = layer};
  load.dead_experts = std::count(counts.begin(), counts.end(), 0.0);
  const double total = std::accumulate(counts.begin(), counts.end(), 0.0);
  if (total <= 0.0) return load;

  const size_t experts = counts.size();
  const double mean = total / double(experts);
  std::vector<double> ascending(counts.begin(), counts.end());
  std::sort(ascending.begin(), ascending.end());
  load.max_over_mean = ascending.back() / mean;
  load.p95_over_mean = ascending[(95 * experts + 99) / 100 - 1] / mean;
  for (double count : counts) {
    if (count > 0.0) load.entropy -= count / total * std::log(count / total);
  }
  return load;
}

std::string to_json_line(const StepRecord& record) {
  Json json = {{"step", record.step},
               {"tokens", record.tokens},
               {"loss", record.loss},
               {"ce", record.ce},
               {"balance_loss", record.balance_loss},
               {"z_loss", record.z_loss},
               {"grad_norm", record.grad_norm},
               {"lr", record.lr},
               {"step_seconds", record.step_seconds},
               {"tokens_per_second", record.tokens_per_second},
               {"tflops", record.tflops},
               {"mfu", record.mfu},
               {"memory_peak_bytes", record.memory_peak_bytes}};
  if (record.valid_loss) json["valid_loss"] = *record.valid_loss;
  Json& router = json["router"] = Json::array();
  for (const LayerLoad& load : record.router) router.push_back(to_json(load));
  return json.dump();
}

MetricsFile::MetricsFile(const fs::path& run_dir) : path_(run_dir / "metrics.jsonl") {
  file_.emplace(path_, /*append=*/true);
}

void MetricsFile::append(const StepRecord& record) {
  file_->write(to_json_line(record) + '\n');
  file_->flush();
}

void MetricsFile::cut_back_to(int64_t step) {
  const std::string text = read_text(path_);
  std::string kept;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    const std::optional<int64_t> line_step = step_of(line);
    if (line_step && *line_step <= step) kept.append(line).push_back('\n');
  }
  if (kept == text) return;
  write_text_atomically(path_, kept);
  file_.emplace(path_, /*append=*/true);
}

}  // namespace optimus
