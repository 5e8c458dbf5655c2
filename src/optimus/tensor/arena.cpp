#include "optimus/tensor/arena.h"

#include <cstdlib>

namespace optimus {
namespace {
constexpr int64_t kUnbounded = int64_t(1) << 60;
}

Arena::Arena(Device& device, std::string name, int64_t capacity)
    : device_(device),
      name_(std::move(name)),
      capacity_(capacity < 0 ? kUnbounded : capacity),
      dry_(device.dry()),
      debug_(!dry_ && std::getenv("OPTIMUS_DEBUG_ARENA") != nullptr),
      nan_(debug_ && std::string_view(std::getenv("OPTIMUS_DEBUG_ARENA")) == "nan") {
  expects(capacity >= 0 || dry_, "arena {}: only a dry device has unbounded memory", name_);
  if (!debug_) base_ = static_cast<std::byte*>(device_.allocate(dry_ ? kUnbounded / 64 : capacity_));
}

Arena::~Arena() {
  forget(0);
  if (!debug_) device_.release(base_, dry_ ? kUnbounded / 64 : capacity_);
}

Tensor Arena::allocate(DType dtype, Shape shape, std::string_view segment) {
  const int64_t size = shape.elements() * size_of(dtype), bytes = (size + kAlignment - 1) / kAlignment * kAlignment;
  require(!dry_ || used_ + bytes <= capacity_, ErrorKind::kMemory, "the run needs more than {} bytes", capacity_);
  expects(used_ + bytes <= capacity_, "arena {}: {} bytes for '{}' exceed the planned {} ({} in use)", name_, bytes,
          segment, capacity_, used_);
  Tensor out(base_ + used_, dtype, shape);
  used_ += bytes;
  if (dry_) {
    live_.push_back({std::string(segment), bytes, nullptr});
    live_bytes_[live_.back().segment] += bytes;
    if (used_ > peak_) peak_segments_ = live_bytes_;
  }
  if (debug_) {
    out.data = device_.allocate(size);
    live_.push_back({"", size, out.data});
    if (nan_) device_.from_host(out, std::vector<std::byte>(size_t(size), std::byte{0xFF}).data());
  }
  peak_ = std::max(peak_, used_);
  return out;
}

void Arena::forget(size_t keep) {
  for (; live_.size() > keep; live_.pop_back()) {
    if (dry_) live_bytes_[live_.back().segment] -= live_.back().bytes;
    else device_.release(live_.back().own, live_.back().bytes);
  }
}

}  // namespace optimus
