// What a run reports of a step, and metrics.jsonl: one JSON object a line, one line a logged step.
//
// The load of a layer with E experts is read off c_e, the number of slots (token, k) that chose expert e in the step:
//   max_over_mean = max_e c_e / mean_e c_e                              1 is perfect balance, E all on one expert
//   p95_over_mean = c_(ceil(0.95 E)) / mean_e c_e                       the c_e in ascending order, nearest rank
//   entropy       = -sum_e p_e ln p_e, p_e = c_e / sum c                nats; ln E is perfect balance
//   dead_experts  = number of e with c_e = 0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "optimus/base/file.h"

namespace optimus {

struct LayerLoad {
  int64_t layer = 0;
  double max_over_mean = 0.0;
  double p95_over_mean = 0.0;
  double entropy = 0.0;
  int64_t dead_experts = 0;

  bool operator==(const LayerLoad&) const = default;
};

/// The load of one layer from its slot counts, one per expert. Without any slot every ratio and the entropy are 0.
LayerLoad layer_load(int64_t layer, std::span<const double> counts);

/// One completed update. Values are the step's own, not averages over an interval.
struct StepRecord {
  int64_t step = 0;    ///< completed updates, from 1
  int64_t tokens = 0;  ///< trained on since the run's start, this step's included
  double loss = 0.0;   ///< ce + balance_coef * balance_loss + z_loss_coef * z_loss
  double ce = 0.0;     ///< mean cross-entropy, nats a token
  double balance_loss = 0.0;
  double z_loss = 0.0;
  double grad_norm = 0.0;  ///< global, before clipping
  double lr = 0.0;
  double step_seconds = 0.0;
  double tokens_per_second = 0.0;
  double tflops = 0.0;  ///< model TFLOP/s a device
  double mfu = 0.0;     ///< share of the device's peak, 0 to 1; NaN where the peak is not known
  int64_t memory_peak_bytes = 0;
  std::optional<double> valid_loss;  ///< cross-entropy alone, on evaluation steps
  std::vector<LayerLoad> router;     ///< MoE layers in order; empty for a dense model
};

/// The record as one line of JSON, without the newline. Finite numbers parse back to the same double; the others, which
/// JSON cannot write, become null.
std::string to_json_line(const StepRecord& record);

/// metrics.jsonl in a run's folder. Errors are Error(kData) with path and reason.
class MetricsFile {
 public:
  explicit MetricsFile(const fs::path& run_dir);

  /// Hands the whole line to the system in one write, so that a process killed at any time leaves whole lines.
  void append(const StepRecord& record);

  /// Call before the first append of a started or resumed run: keeps the whole records with at most this step (the
  /// checkpoint's; 0 for a new run) and drops everything else, a torn last line included. Readers see the file before
  /// or after, never in between.
  void cut_back_to(int64_t step);

 private:
  fs::path path_;
  std::optional<OutputFile> file_;
};

}  // namespace optimus
