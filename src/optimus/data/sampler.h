// Which window is sample n of a run: a pure function of (seed, n), so the step number is all the state there is.
//
// Without weights the windows of all sources are one list, read in another random order every epoch. With weights,
// samples go to the sources in blocks of B. With W_s the weights' normalised cumulative sum, source s has drawn
//
//   drawn_s(n) = floor(W_s n) - floor(W_{s-1} n),   |drawn_s(n) - w_s n| < 1,   sum_s drawn_s(n) = n
//
// samples at the block bounds n = 0, B, 2B, ... Inside a block the sources alternate as evenly as their quotas allow
// (at random they would cluster), and the k-th draw of a source takes the k-th window of its own epochs. So no window
// comes twice before all windows of its source have come once.
#pragma once

#include <cstdint>
#include <vector>

#include "optimus/base/philox.h"

namespace optimus {

struct Window {
  int64_t source;
  int64_t index;  ///< of the window in its source

  bool operator==(const Window&) const = default;
};

class Sampler {
 public:
  /// windows: the number of each source's windows, not all zero. weights: empty, or positive and one a source, whose
  /// windows must not be zero then. shuffle = false keeps the order of the windows, epoch after epoch.
  Sampler(std::vector<int64_t> windows, const std::vector<double>& weights, uint64_t seed, bool shuffle);

  /// Sample n >= 0 of the run; n = step * global_batch + position in the batch.
  Window at(int64_t n) const;

  /// Samples between the bounds where the weights hold exactly: at least 4096, and enough for one of the rarest source.
  int64_t block() const { return block_; }

 private:
  void set_weights(const std::vector<double>& weights);
  int64_t drawn(size_t source, int64_t n) const;
  int64_t in_epochs(const Philox& generator, int64_t size, int64_t n) const;
  Window at_mixed(int64_t n) const;

  std::vector<int64_t> windows_;
  std::vector<int64_t> window_ends_;  ///< cumulative
  std::vector<int64_t> share_ends_;   ///< W_s in units of 2^-52; empty without weights
  int64_t block_ = 4096;
  std::vector<Philox> generators_;  ///< one for all windows, or one a source with weights
  bool shuffle_;
};

}  // namespace optimus
