// What a person watching a run sees on standard error. On a terminal one line is redrawn in place:
//   step 1200/5000 | loss 2.3145 | valid 2.4012 | 183.4k tokens/s | MFU 41.2% | 3.1 GiB | ETA 1h 02m
// Piped into a file, the same line once a log interval.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "optimus/train/metrics.h"

namespace optimus {

/// The line of a step. What is unknown is left out: an MFU that is not finite, a valid loss never computed, memory of
/// 0. `seconds_left` is the estimate of the rest of the run.
std::string format_progress(const StepRecord& record, std::optional<double> valid_loss, int64_t total_steps,
                            double seconds_left);

/// "0s", "59s", "4m 10s", "1h 02m", "3d 04h": the two leading units, rounded down.
std::string format_duration(double seconds);

class Progress {
 public:
  /// Lines go to `descriptor` (standard error in the program); whether that is a terminal is found here.
  Progress(int64_t total_steps, int64_t log_every, int descriptor);
  /// The live line, if one is open, is ended.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Call after every step. Piped, a line is written for steps of the log interval, evaluation steps and the last step.
  void update(const StepRecord& record);

  /// Ends the live line with its latest state and a newline; the next update opens a new one. Call it before anything
  /// else is written to the terminal. Does nothing where no live line is open.
  void finish();

 private:
  using Clock = std::chrono::steady_clock;

  void draw();

  int64_t total_steps_, log_every_;
  int descriptor_;
  bool terminal_;
  std::optional<double> seconds_per_step_;  ///< moving average
  std::optional<double> valid_loss_;        ///< of the last evaluation
  std::string line_;                        ///< live line; empty when none is open
  Clock::time_point drawn_at_{};
};

}  // namespace optimus
