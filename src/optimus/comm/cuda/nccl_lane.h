// A lane: one communicator of NCCL with a stream of its own, on which what is started runs in that order. What runs in
// different lanes never waits for each other but by the device's stream.
//
// An operation begins when all that the device's stream was asked for before has been done; its end is an event that the
// device's stream waits for when somebody wants the result. A lane knows the events of its operations, so that a
// watchdog can tell an operation that waits for peers from one that waits for this device. For CUDA sources only.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "optimus/comm/communicator.h"
#include "optimus/comm/cuda/nccl_library.h"
#include "optimus/comm/watchdog.h"
#include "optimus/tensor/cuda/cuda_device.h"

namespace optimus::cuda {

/// What the lanes of a group share.
struct LaneGroup {
  CudaDevice& device;
  std::shared_ptr<Watchdog> watchdog;
  std::string name;
  int world_rank;
  /// After a failure the peers are at an unknown place: from then on nothing here calls NCCL.
  bool broken = false;
  const int exceptions = std::uncaught_exceptions();
};

class Lane final : public Watched {
 public:
  using Create = std::function<ncclResult_t(ncclComm_t* comm)>;

  /// `create` makes the communicator (or none) by a call of NCCL, whose text is `call`; it may wait for peers.
  Lane(std::shared_ptr<LaneGroup> group, const char* call, const Create& create);
  /// Waits for what was started. Collective, as the end of a communicator is.
  ~Lane() override;

  /// False where the call that should create the communicator left this rank out.
  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }

  /// Runs enqueue(), which puts the work of an operation on the stream.
  Pending start(const char* operation, int64_t bytes, const std::function<void()>& enqueue);
  /// Checks a call of NCCL; the message names group, operation and call.
  void check(const char* operation, const char* call, ncclResult_t result);
  /// The host waits for what was started.
  void synchronise_wait();

  std::optional<Wait> oldest_wait() override;
  std::string failure() override;

  struct Operation {
    const char* name = nullptr;
    int64_t bytes = 0;
    Event ready, done;
    std::optional<Clock::time_point> since{};  ///< `ready` was seen
  };

 private:
  std::shared_ptr<Operation> take_operation(const char* name, int64_t bytes);
  void retire();
  /// While it lives, the host is in a call of NCCL, which the first time waits for peers.
  class HostCall {
   public:
    HostCall(Lane& lane, const char* operation, int64_t bytes);
    ~HostCall();
    HostCall(const HostCall&) = delete;
    HostCall& operator=(const HostCall&) = delete;

   private:
    Lane& lane_;
  };

  std::shared_ptr<LaneGroup> group_;
  Stream stream_;

  std::mutex mutex_;  ///< of what follows, which the watchdog reads
  ncclComm_t comm_ = nullptr;
  std::deque<std::shared_ptr<Operation>> running_;
  std::vector<std::shared_ptr<Operation>> idle_;
  const char* host_operation_ = nullptr;
  int64_t host_bytes_ = 0;
  Clock::time_point host_since_{};
};

/// `call` is a function's name and its arguments.
#define OPTIMUS_NCCL(lane, operation, call) (lane).check((operation), #call, ::optimus::cuda::nccl().call)

}  // namespace optimus::cuda
