#include "optimus/comm/cuda/nccl_lane.h"

#include "optimus/base/log.h"

namespace optimus::cuda {
namespace {

/// A collective that finds no room beside a product makes all its peers wait, so its blocks go first.
int highest_priority() {
  int lowest = 0, highest = 0;
  OPTIMUS_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  return highest;
}

bool reached(cudaEvent_t event) {
  const cudaError_t status = cudaEventQuery(event);
  if (status == cudaErrorNotReady) cudaGetLastError();  // it would be taken for the failure of a later call
  return status == cudaSuccess;
}

std::string text_of(const LaneGroup& group, const char* operation, int64_t bytes) {
  return fmt::format("group {}, {} of {} bytes", group.name, operation, bytes);
}

/// Waiting is the stream's business, so even a transfer that an exception passes may wait.
class LaneTransfer final : public Transfer {
 public:
  LaneTransfer(std::shared_ptr<LaneGroup> group, std::shared_ptr<Lane::Operation> operation)
      : group_(std::move(group)), operation_(std::move(operation)) {}
  ~LaneTransfer() override {
    if (operation_) cudaStreamWaitEvent(group_->device.stream(), operation_->done, 0);
  }
  LaneTransfer(const LaneTransfer&) = delete;
  LaneTransfer& operator=(const LaneTransfer&) = delete;

  void wait() override {
    if (!operation_) return;
    OPTIMUS_CUDA(cudaStreamWaitEvent(group_->device.stream(), operation_->done, 0));
    operation_.reset();
  }

 private:
  std::shared_ptr<LaneGroup> group_;
  std::shared_ptr<Lane::Operation> operation_;
};

}  // namespace

Lane::Lane(std::shared_ptr<LaneGroup> group, const char* call, const Create& create)
    : group_(std::move(group)), stream_(highest_priority()) {
  const HostCall host_call(*this, "start", 0);
  group_->watchdog->add(*this);
  try {
    ncclComm_t comm = nullptr;
    check("start", call, create(&comm));
    const std::lock_guard lock(mutex_);
    comm_ = comm;
  } catch (...) {
    group_->watchdog->remove(*this);
    throw;
  }
}

Lane::~Lane() {
  if (group_->broken || std::uncaught_exceptions() > group_->exceptions) {
    // The peers may never come, and without them the end of a communicator may wait forever.
    group_->broken = true;
    group_->watchdog->expect_end(
        fmt::format("rank {} failed while it used group {}, but did not end", group_->world_rank, group_->name));
    group_->watchdog->remove(*this);
    return;
  }
  ncclComm_t comm = nullptr;
  {
    const std::lock_guard lock(mutex_);
    comm = std::exchange(comm_, nullptr);
  }
  const HostCall host_call(*this, "end", 0);
  if (comm && cudaStreamSynchronize(stream_) == cudaSuccess) {
    const ncclResult_t result = nccl().ncclCommDestroy(comm);
    if (result != ncclSuccess)
      log().error("rank {}, group {}, end: ncclCommDestroy: {}", group_->world_rank, group_->name,
                  nccl().ncclGetErrorString(result));
  }
  group_->watchdog->remove(*this);
}

void Lane::check(const char* operation, const char* call, ncclResult_t result) {
  if (result == ncclSuccess) return;
  group_->broken = true;
  fail(ErrorKind::kCommunication, "rank {}, group {}, {}: {}: {} ({})", group_->world_rank, group_->name, operation,
       call, nccl().ncclGetErrorString(result), nccl().ncclGetLastError(nullptr));
}

Pending Lane::start(const char* operation, int64_t bytes, const std::function<void()>& enqueue) {
  require(!group_->broken, ErrorKind::kCommunication, "rank {}, group {}: {} after an earlier failure",
          group_->world_rank, group_->name, operation);
  std::shared_ptr<Operation> started = take_operation(operation, bytes);
  OPTIMUS_CUDA(cudaEventRecord(started->ready, group_->device.stream()));
  OPTIMUS_CUDA(cudaStreamWaitEvent(stream_, started->ready, 0));
  {
    const HostCall host_call(*this, operation, bytes);
    enqueue();
  }
  OPTIMUS_CUDA(cudaEventRecord(started->done, stream_));
  {
    const std::lock_guard lock(mutex_);
    running_.push_back(started);
  }
  return std::make_unique<LaneTransfer>(group_, std::move(started));
}

void Lane::synchronise_wait() { OPTIMUS_CUDA(cudaStreamSynchronize(stream_)); }

std::shared_ptr<Lane::Operation> Lane::take_operation(const char* name, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  retire();
  std::shared_ptr<Operation> taken;
  if (idle_.empty()) {
    taken = std::make_shared<Operation>();
  } else {
    taken = std::move(idle_.back());
    idle_.pop_back();
  }
  taken->name = name;
  taken->bytes = bytes;
  taken->since.reset();
  return taken;
}

/// What is done leaves the lane. Its events serve again, unless a transfer still wants to wait for them.
void Lane::retire() {
  for (; !running_.empty() && reached(running_.front()->done); running_.pop_front())
    if (running_.front().use_count() == 1) idle_.push_back(std::move(running_.front()));
}

Lane::HostCall::HostCall(Lane& lane, const char* operation, int64_t bytes) : lane_(lane) {
  const std::lock_guard lock(lane.mutex_);
  lane.host_operation_ = operation;
  lane.host_bytes_ = bytes;
  lane.host_since_ = Clock::now();
}

Lane::HostCall::~HostCall() {
  const std::lock_guard lock(lane_.mutex_);
  lane_.host_operation_ = nullptr;
}

std::optional<Watched::Wait> Lane::oldest_wait() {
  cudaSetDevice(group_->device.index());  // of this thread; else it would open the first device
  const std::lock_guard lock(mutex_);
  retire();
  if (!running_.empty()) {
    Operation& oldest = *running_.front();
    if (!oldest.since && reached(oldest.ready)) oldest.since = Clock::now();
    if (oldest.since) return Wait{text_of(*group_, oldest.name, oldest.bytes), *oldest.since};
  }
  if (host_operation_) return Wait{text_of(*group_, host_operation_, host_bytes_), host_since_};
  return std::nullopt;
}

std::string Lane::failure() {
  const std::lock_guard lock(mutex_);
  ncclResult_t result = ncclSuccess;
  if (!comm_ || nccl().ncclCommGetAsyncError(comm_, &result) != ncclSuccess) return "";
  if (result == ncclSuccess || result == ncclInProgress) return "";
  return fmt::format("rank {}, group {}: NCCL has failed: {} ({})", group_->world_rank, group_->name,
                     nccl().ncclGetErrorString(result), nccl().ncclGetLastError(nullptr));
}

}  // namespace optimus::cuda
