// The trainer, top to bottom: resume or start, steps, evaluation, checkpoints, and a clean end at the last step or a
// signal.
#pragma once

#include <atomic>
#include <optional>

#include "optimus/data/loader.h"
#include "optimus/train/engine.h"
#include "optimus/train/metrics.h"
#include "optimus/train/progress.h"
#include "optimus/train/tensorboard.h"

namespace optimus {

class Trainer {
 public:
  /// Takes the run's folder (locked until destruction), resumes from its newest valid checkpoint or starts anew.
  /// `signal`: the number of the signal that asked to stop, 0 while none did; it may be set at any time.
  Trainer(const RunConfig& config, const std::atomic<int>& signal);

  /// Trains to the last step. Returns the exit code: 0 when done, 128 + signal when stopped (a last checkpoint was
  /// written). Throws Error(kNumerical) for a step whose loss or gradient is not finite; its update was not made.
  int run();

 private:
  void start_or_resume();
  void train_step(int64_t step);
  std::optional<double> evaluate(int64_t completed);
  void report(int64_t completed, double seconds, const StepResult& result, std::optional<double> valid_loss);
  void save(int64_t completed);
  void save_before_failing();

  RunConfig config_;
  const std::atomic<int>& signal_;
  FileLock lock_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Engine> engine_;
  int64_t completed_ = 0;  ///< updates made
  int64_t saved_ = -1;     ///< updates in the newest checkpoint
  fs::path origin_;        ///< checkpoint that the weights came from; empty for a fresh start
  std::optional<Loader> loader_;
  std::optional<EvalWindows> valid_;
  std::optional<MetricsFile> metrics_;
  std::optional<TensorBoardWriter> tensorboard_;
  std::optional<Progress> progress_;
};

}  // namespace optimus
