#include "optimus/data/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "optimus/base/error.h"
#include "optimus/data/permutation.h"

namespace optimus {
namespace {

constexpr int kShareBits = 52;
constexpr int64_t kWhole = int64_t{1} << kShareBits;
constexpr int64_t kSmallestShare = kWhole >> 30;  // blocks stay below 2^30, products of positions and quotas below 2^60

/// floor(share * n), exactly: a rounding error here would lose or repeat a window.
int64_t scaled(int64_t share, int64_t n) { return int64_t((static_cast<__int128>(share) * n) >> kShareBits); }

}  // namespace

Sampler::Sampler(std::vector<int64_t> windows, const std::vector<double>& weights, uint64_t seed, bool shuffle)
    : windows_(std::move(windows)), window_ends_(windows_.size()), shuffle_(shuffle) {
  std::partial_sum(windows_.begin(), windows_.end(), window_ends_.begin());
  expects(!windows_.empty() && window_ends_.back() > 0, "a sampler without windows");
  if (weights.empty()) {
    generators_ = {philox_for(seed, "shuffle")};
    return;
  }
  expects(weights.size() == windows_.size() && std::ranges::min(windows_) > 0, "a weight needs a source with windows");
  for (size_t s = 0; s < windows_.size(); ++s)
    generators_.push_back(philox_for(seed, fmt::format("shuffle source {}", s)));
  set_weights(weights);
}

void Sampler::set_weights(const std::vector<double>& weights) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double sum = 0;
  int64_t smallest = kWhole;
  for (size_t s = 0; s < weights.size(); ++s) {
    sum += weights[s];
    const bool last = s + 1 == weights.size();
    const int64_t before = s == 0 ? 0 : share_ends_.back();
    share_ends_.push_back(last ? kWhole : std::llround(sum / total * double(kWhole)));
    smallest = std::min(smallest, share_ends_.back() - before);
    require(weights[s] > 0 && std::isfinite(total) && smallest >= kSmallestShare, ErrorKind::kUsage,
            "data source {} has weight {} of a total of {}: weights must be finite and at least 1e-9 of their total", s,
            weights[s], total);
  }
  // With block * w_s >= 1 the floors cannot make a quota negative.
  while (block_ < (kWhole + smallest - 1) / smallest) block_ *= 2;
}

int64_t Sampler::drawn(size_t source, int64_t n) const {
  return scaled(share_ends_[source], n) - (source == 0 ? 0 : scaled(share_ends_[source - 1], n));
}

int64_t Sampler::in_epochs(const Philox& generator, int64_t size, int64_t n) const {
  const int64_t epoch = n / size, i = n % size;
  return shuffle_ ? Permutation(size, generator, uint64_t(epoch))(i) : i;
}

Window Sampler::at(int64_t n) const {
  expects(n >= 0, "sample {}", n);
  if (!share_ends_.empty()) return at_mixed(n);
  const int64_t window = in_epochs(generators_.front(), window_ends_.back(), n);
  const int64_t source = std::upper_bound(window_ends_.begin(), window_ends_.end(), window) - window_ends_.begin();
  return {source, window - (source == 0 ? 0 : window_ends_[size_t(source) - 1])};
}

Window Sampler::at_mixed(int64_t n) const {
  const int64_t begin = n / block_ * block_;
  // Source by source, spread its quota evenly over the places that the sources before it left free; the last one's
  // quota is all that is left, so the loop ends there.
  int64_t place = n - begin, free = block_;
  for (size_t s = 0;; ++s) {
    const int64_t drawn_before = drawn(s, begin);
    const int64_t quota = drawn(s, begin + block_) - drawn_before;
    const int64_t taken = place * quota / free;
    if ((place + 1) * quota / free > taken)
      return {int64_t(s), in_epochs(generators_[s], windows_[s], drawn_before + taken)};
    place -= taken;
    free -= quota;
  }
}

}  // namespace optimus
