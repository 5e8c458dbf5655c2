// Token files to batches. A file is cut into windows of S tokens that do not overlap; the tail that fills no window
// is left out, and no window crosses files. A window is one sequence of a batch: token t is asked to predict token
// t + 1 of the same window, so its last position has weight 0.
//
// A batch is a pure function of (data, seed, step): nothing is saved to resume, and a data-parallel rank reads its
// part of the samples alone.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "optimus/data/config.h"
#include "optimus/data/sampler.h"
#include "optimus/data/token_file.h"

namespace optimus {

/// B sequences of S tokens; every array has B * S elements, sequence by sequence.
struct HostBatch {
  int64_t sequences = 0;        ///< B
  int64_t sequence_length = 0;  ///< S
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;    ///< 0 where the weight is 0
  std::vector<int32_t> positions;  ///< 0 to S - 1
  std::vector<float> weights;      ///< of each target in the loss
};

/// Next-token prediction over `tokens`, whole sequences of `sequence` tokens each.
HostBatch next_token_batch(std::vector<int32_t> tokens, int64_t sequence);

/// The samples of a step, and the part of them that belongs to this rank: [first, first + count).
struct BatchPart {
  int64_t sequence = 0;      ///< S, at least 2
  int64_t vocab = 0;         ///< ids must be below
  int64_t global_batch = 0;  ///< samples a step
  int64_t first = 0;
  int64_t count = 0;
};

/// The training data: data.train, in the order of `Sampler`.
class Loader {
 public:
  /// Error(kUsage) without data.train or with weights for some sources only; Error(kData) for files that cannot be
  /// read or are too short. `default_seed` serves where data.seed is absent.
  Loader(const DataConfig& config, const BatchPart& part, int64_t default_seed);

  /// This rank's samples of a step (from 0). Error(kData) for an id outside the vocabulary. Safe from several threads.
  HostBatch batch(int64_t step) const;
  /// The same batch, made ahead in the background when steps are asked for in order; any other step starts the reading
  /// ahead anew. Throws what batch(step) would. Waits for the disk. One caller at a time.
  HostBatch next(int64_t step);

  /// Windows of all sources together: an epoch, without weights.
  int64_t windows() const { return windows_; }

 private:
  struct Ahead {
    HostBatch batch;
    std::exception_ptr error;
  };
  void read_ahead(const std::stop_token& stop, int64_t step);

  BatchPart part_;
  std::vector<TokenFile> files_;
  int64_t windows_;
  Sampler sampler_;

  int64_t next_step_ = -1;  ///< the step at the front of ahead_
  std::mutex mutex_;        ///< guards ahead_
  std::condition_variable_any changed_;
  std::deque<Ahead> ahead_;
  std::jthread thread_;  ///< last: joined before anything it uses goes
};

/// The first windows of the validation files, in order.
class EvalWindows {
 public:
  /// `limit` windows, 0 for all. Error(kUsage) without data.valid, Error(kData) as for Loader.
  EvalWindows(const DataConfig& config, int64_t sequence, int64_t vocab, int64_t limit);

  int64_t windows() const { return windows_; }
  /// Windows [first, first + count), within windows().
  HostBatch batch(int64_t first, int64_t count) const;

 private:
  int64_t sequence_;
  std::vector<TokenFile> files_;
  int64_t windows_;
};

}  // namespace optimus
