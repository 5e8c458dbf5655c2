// The trainer, top to bottom: resume or start, steps, evaluation, checkpoints, and a clean end at the last step or a
// signal. Every rank runs it; the first one alone holds the run's folder, speaks and writes metrics. What a rank decides
// by itself (a signal came, its data cannot be read) is agreed on before anyone acts on it.
#pragma once

#include <atomic>
#include <optional>

#include "optimus/checkpoint/checkpoint.h"
#include "optimus/comm/processes.h"
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
  Trainer(const RunConfig& config, const std::atomic<int>& signal, Processes& processes);

  /// Trains to the last step. Returns the exit code: 0 when done, 128 + signal when stopped (a last checkpoint was
  /// written). Throws Error(kNumerical) for a step whose loss or gradient is not finite; its update was not made.
  int run();

 private:
  std::optional<Checkpoint> agreed_checkpoint(const std::function<std::optional<Checkpoint>()>& find);
  void start_or_resume();
  bool first() const { return processes_.rank() == 0; }
  /// The next batch; nothing when a rank was asked to stop. An error of one rank's data is thrown on all.
  std::optional<HostBatch> next_batch();
  void train_step(HostBatch batch);
  std::optional<double> evaluate(int64_t completed);
  void report(int64_t completed, double seconds, const StepResult& result, std::optional<double> valid_loss);
  void report_here(int64_t completed, double seconds, const StepResult& result, std::optional<double> valid_loss);
  void save(int64_t completed);
  void save_before_failing();

  RunConfig config_;
  const std::atomic<int>& signal_;
  Processes& processes_;
  std::optional<FileLock> lock_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Engine> engine_;
  int stopped_by_ = 0;
  bool stepping_ = false;  ///< a step has begun and not ended: the engine's state is that of none
                           ///< the signal that all ranks agreed to stop for
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
