// One GPU: its memory, its compute stream, and what kernels want to know of it. For CUDA sources only.
#pragma once

#include "optimus/tensor/cuda/runtime.h"
#include "optimus/tensor/device.h"

namespace optimus::cuda {

class CudaDevice final : public Device {
 public:
  /// Throws Error(kUsage) with one sentence where there is no such GPU, its driver is too old for this build's CUDA, or its
  /// architecture is not among those that the program was compiled for.
  explicit CudaDevice(int index);
  ~CudaDevice() override;

  DeviceKind kind() const override { return DeviceKind::cuda; }
  /// What is free now, less what modules take when their kernels are first used.
  int64_t capacity() const override;
  double peak_flops() const override;
  std::string identity() const override;
  int64_t used_bytes() const override;
  void* allocate(int64_t bytes) override;
  void release(void* data, int64_t bytes) override;
  /// In order on the compute stream. `from` may be reused at once.
  void from_host(Tensor to, const void* from) override;
  void to_host_wait(void* to, Tensor from) override;
  void timeline(std::string_view name) override;
  void synchronise_wait() override;
  std::unique_ptr<Moment> moment() override;

  int index() const { return index_; }
  cudaStream_t stream() const { return stream_; }
  int multiprocessors() const { return multiprocessors_; }
  /// Compute capability, 90 for 9.0.
  int architecture() const { return architecture_; }

 private:
  static constexpr int64_t kStagingBytes = int64_t(8) << 20;

  int index_;
  int multiprocessors_ = 0, architecture_ = 0;
  Stream stream_;
  // Page-locked memory that small copies to the device wait in; begun anew, and waited for, when it is full.
  std::byte* staging_ = nullptr;
  int64_t staged_ = 0;
  bool in_range_ = false;  ///< of the timeline
};

/// The device behind the interface; anything else is a bug.
CudaDevice& as_cuda(Device& device);

}  // namespace optimus::cuda
