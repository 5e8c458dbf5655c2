// Device memory that an op uses while it runs. It is of one fixed size, so that the memory plan knows it, and every op
// takes it from the beginning: ops run one after another on one stream.
#pragma once

#include "optimus/ops/cuda/limits.h"
#include "optimus/tensor/device.h"

namespace optimus::cuda {

class Scratch {
 public:
  explicit Scratch(Device& device) : device_(device), data_(static_cast<std::byte*>(device.allocate(kScratchBytes))) {}
  ~Scratch() { device_.release(data_, kScratchBytes); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  /// Begins an op's use of it; what was taken before is given back.
  void begin() { used_ = 0; }
  /// Uninitialised, 256-byte aligned. More than there is, is a bug: ops choose their partial results by its size.
  template <typename T>
  T* take(int64_t count) {
    const int64_t bytes = (count * int64_t(sizeof(T)) + 255) / 256 * 256;
    expects(used_ + bytes <= kScratchBytes, "an op asks for {} bytes of scratch, {} of {} are in use", bytes, used_,
            kScratchBytes);
    T* out = reinterpret_cast<T*>(data_ + used_);
    used_ += bytes;
    return out;
  }

 private:
  Device& device_;
  std::byte* data_;
  int64_t used_ = 0;
};

}  // namespace optimus::cuda
