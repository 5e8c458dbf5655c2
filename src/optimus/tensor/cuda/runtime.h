// CUDA's runtime with every call checked, and owners of its handles. For CUDA sources only.
#pragma once

#include <utility>

#include <cuda_runtime_api.h>

#include "optimus/base/error.h"

namespace optimus::cuda {

/// Throws Error(kCommunication) for a device that has failed (the run's end, as for a lost peer) and Error(kMemory) for
/// memory that was refused; `call` is the text of the expression.
void check(cudaError_t status, const char* call);

#define OPTIMUS_CUDA(call) ::optimus::cuda::check((call), #call)

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming) { OPTIMUS_CUDA(cudaEventCreateWithFlags(&event_, flags)); }
  ~Event() {
    if (event_) cudaEventDestroy(event_);
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class Stream {
 public:
  /// Of streams whose blocks are ready, the device serves those of the lowest number first.
  explicit Stream(int priority = 0) {
    OPTIMUS_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority));
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace optimus::cuda
