#include "optimus/tensor/arena.h"

namespace optimus {
namespace {
constexpr int64_t kUnbounded = int64_t(1) << 60;
}

Arena::Arena(Device& device, std::string name, int64_t capacity)
    : device_(device), name_(std::move(name)), capacity_(capacity < 0 ? kUnbounded : capacity), dry_(device.dry()) {
  expects(capacity >= 0 || dry_, "arena {}: only a dry device has unbounded memory", name_);
  base_ = static_cast<std::byte*>(device_.allocate(dry_ ? kUnbounded / 64 : capacity_));
}

Arena::~Arena() { device_.release(base_, dry_ ? kUnbounded / 64 : capacity_); }

Tensor Arena::allocate(DType dtype, Shape shape, std::string_view segment) {
  const int64_t bytes = (shape.elements() * size_of(dtype) + kAlignment - 1) / kAlignment * kAlignment;
  require(!dry_ || used_ + bytes <= capacity_, ErrorKind::kMemory, "the run needs more than {} bytes", capacity_);
  expects(used_ + bytes <= capacity_, "arena {}: {} bytes for '{}' exceed the planned {} ({} in use)", name_, bytes,
          segment, capacity_, used_);
  Tensor out(base_ + used_, dtype, shape);
  used_ += bytes;
  if (dry_) {
    live_.push_back({std::string(segment), bytes});
    live_bytes_[live_.back().segment] += bytes;
    if (used_ > peak_) peak_segments_ = live_bytes_;
  }
  peak_ = std::max(peak_, used_);
  return out;
}

void Arena::forget(size_t keep) {
  for (; live_.size() > keep; live_.pop_back()) live_bytes_[live_.back().segment] -= live_.back().bytes;
}

}  // namespace optimus
