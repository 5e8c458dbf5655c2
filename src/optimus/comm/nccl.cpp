// Communicators over the memory of GPUs, one process a GPU, by NCCL; MPI connects the processes and stays for what the
// host says to its peers.
//
// The device's stream computes; a group's collectives run on a stream of the group (a lane, cuda/nccl_lane.h). Starting a
// transfer makes the lane wait for the work so far, waiting for it makes the device's stream wait for the lane. The host
// waits for peers in four places only: where a communicator is made, where it ends, at a barrier, and at an operation's first use,
// when NCCL connects the ranks that take part.
//
// Messages. A send waits for its receiver, and a lane is in order: were both directions of a pair of neighbours in one
// lane, each rank's send could stand before the receive that the other one's waits for. So each neighbour that sends has
// a communicator of two ranks with each neighbour that receives. They are made and used once, when the group is made:
// a first use later would make hosts wait for each other, in an order that nobody has checked. The ring's edges (i, i+1)
// fall into phases in which no rank has two: even i, odd i, and the last edge of an odd ring. All ranks go through the
// phases together, so a rank waits for one peer only, who waits for it.
//
// The work of several lanes must be able to start whatever other lanes wait for: the process should have as many hardware
// queues as streams (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless it is set before CUDA starts; start_processes() sets it).
//
// NCCL's own settings are those of its environment. Where GPUs of a host are shared among users, NCCL_NVLS_ENABLE=0 keeps
// it from the NVLink switch's multicast.
#include <map>
#include <numeric>

#include "optimus/comm/contracts.h"
#include "optimus/comm/cuda/nccl_lane.h"
#include "optimus/comm/processes.h"

namespace optimus {
namespace {

using cuda::Lane, cuda::LaneGroup, cuda::CudaDevice, cuda::nccl;

/// For what is only moved.
constexpr ncclDataType_t kBytes = ncclUint8;

ncclDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return ncclFloat32;
    case DType::bf16: return ncclBfloat16;
    case DType::f64: return ncclFloat64;
    case DType::i32: return ncclInt32;
    case DType::i16:
    case DType::i64: break;
  }
  expects(false, "a sum over ranks of {}", name_of(dtype));
  return ncclFloat32;
}

void copy_on(cudaStream_t stream, void* to, const void* from, int64_t bytes) {
  OPTIMUS_CUDA(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToDevice, stream));
}

std::byte* bytes_of(const Tensor& x) {
  expects(x || x.elements() == 0, "a tensor {} without memory cannot be moved", x.shape);
  return static_cast<std::byte*>(x.data);
}

/// A lane from one rank of the group to another, which are all its ranks.
struct MessageLane {
  std::unique_ptr<Lane> lane;
  int peer;  ///< the other rank's number in the lane's communicator
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<LaneGroup> group, std::unique_ptr<Communicator> host, Messages messages)
      : group_(std::move(group)), host_(std::move(host)) {
    ncclUniqueId id{};
    static_assert(sizeof id % sizeof(int32_t) == 0);
    if (rank() == 0)
      require(nccl().ncclGetUniqueId(&id) == ncclSuccess, ErrorKind::kCommunication,
              "rank {}, group {}: ncclGetUniqueId: {}", group_->world_rank, group_->name,
              nccl().ncclGetLastError(nullptr));
    host_->broadcast(Tensor(&id, DType::i32, {int64_t(sizeof id / sizeof(int32_t))}), 0);
    lane_ = std::make_unique<Lane>(group_, "ncclCommInitRankConfig", [&](ncclComm_t* comm) {
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 1;
      return nccl().ncclCommInitRankConfig(comm, size(), id, rank(), &config);
    });
    if (messages == Messages::between_neighbours) connect_neighbours();
  }

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }

  void all_reduce(Tensor x) override {
    check_all_reduce(x);
    const ncclDataType_t type = type_of(x.dtype);
    if (x.elements() == 0) return;
    std::byte* data = bytes_of(x);
    start("all_reduce", "ncclAllReduce", x.bytes(), [&] {
      return nccl().ncclAllReduce(data, data, size_t(x.elements()), type, ncclSum, lane_->comm(), lane_->stream());
    })->wait();
  }

  void broadcast(Tensor x, int root) override {
    check_broadcast(*this, x, root);
    if (x.elements() == 0) return;
    std::byte* data = bytes_of(x);
    start("broadcast", "ncclBroadcast", x.bytes(), [&] {
      return nccl().ncclBroadcast(data, data, size_t(x.bytes()), kBytes, root, lane_->comm(), lane_->stream());
    })->wait();
  }

  /// Of the hosts, when their devices have done what they were asked for.
  void barrier() override {
    group_->device.synchronise_wait();
    lane_->synchronise_wait();
    for (const auto& entry : message_lanes_) entry.second.lane->synchronise_wait();
    host_->barrier();
  }

  Pending start_reduce_scatter(Tensor whole, Tensor part, Tensor scratch) override {
    check_reduce_scatter(*this, whole, part, scratch);
    if (part.elements() == 0) return std::make_unique<FinishedTransfer>();
    std::byte *from = bytes_of(whole), *to = bytes_of(part);
    return start("reduce_scatter", "ncclReduceScatter", whole.bytes(), [&] {
      return nccl().ncclReduceScatter(from, to, size_t(part.elements()), type_of(part.dtype), ncclSum, lane_->comm(),
                                      lane_->stream());
    });
  }
  bool reduce_needs_scratch() const override { return false; }

  Pending start_all_gather(Tensor part, Tensor whole) override {
    check_all_gather(*this, part, whole);
    if (part.elements() == 0) return std::make_unique<FinishedTransfer>();
    std::byte *from = bytes_of(part), *to = bytes_of(whole);
    return start("all_gather", "ncclAllGather", whole.bytes(), [&] {
      return nccl().ncclAllGather(from, to, size_t(part.bytes()), kBytes, lane_->comm(), lane_->stream());
    });
  }

  Pending start_all_to_all(Tensor send, std::span<const int64_t> send_rows, Tensor receive,
                           std::span<const int64_t> receive_rows) override {
    check_all_to_all(*this, send, send_rows, receive, receive_rows);
    const int64_t row = row_bytes(send);
    const auto sum = [](std::span<const int64_t> rows) {
      return std::accumulate(rows.begin(), rows.end(), int64_t{0});
    };
    const int64_t sent_bytes = sum(send_rows) * row;
    if (sent_bytes == 0 && sum(receive_rows) * row == 0) return std::make_unique<FinishedTransfer>();
    std::byte *from = bytes_of(send), *to = bytes_of(receive);
    return lane_->start("all_to_all", sent_bytes, [&] { exchange(from, send_rows, to, receive_rows, row); });
  }

  Pending start_send(Tensor x, int to) override {
    check_message(*this, x, to);
    if (x.elements() == 0) return std::make_unique<FinishedTransfer>();
    const MessageLane& way = message_lane(rank(), to);
    std::byte* data = bytes_of(x);
    Lane& lane = *way.lane;
    return lane.start("send", x.bytes(), [&] {
      OPTIMUS_NCCL(lane, "send", ncclSend(data, size_t(x.bytes()), kBytes, way.peer, lane.comm(), lane.stream()));
    });
  }
  Pending start_receive(Tensor x, int from) override {
    check_message(*this, x, from);
    if (x.elements() == 0) return std::make_unique<FinishedTransfer>();
    const MessageLane& way = message_lane(from, rank());
    std::byte* data = bytes_of(x);
    Lane& lane = *way.lane;
    return lane.start("receive", x.bytes(), [&] {
      OPTIMUS_NCCL(lane, "receive", ncclRecv(data, size_t(x.bytes()), kBytes, way.peer, lane.comm(), lane.stream()));
    });
  }

 private:
  /// A collective that is one call of NCCL.
  template <typename Call>
  Pending start(const char* operation, const char* name, int64_t bytes, Call&& call) {
    return lane_->start(operation, bytes, [&] { lane_->check(operation, name, call()); });
  }

  void exchange(const std::byte* from, std::span<const int64_t> send_rows, std::byte* to,
                std::span<const int64_t> receive_rows, int64_t row) {
    const cudaStream_t stream = lane_->stream();
    OPTIMUS_NCCL(*lane_, "all_to_all", ncclGroupStart());
    for (int r = 0; r < size(); ++r) {
      const int64_t out = send_rows[size_t(r)] * row, in = receive_rows[size_t(r)] * row;
      if (r == rank()) {
        if (out > 0) copy_on(stream, to, from, out);
      } else {
        if (out > 0) OPTIMUS_NCCL(*lane_, "all_to_all", ncclSend(from, size_t(out), kBytes, r, lane_->comm(), stream));
        if (in > 0) OPTIMUS_NCCL(*lane_, "all_to_all", ncclRecv(to, size_t(in), kBytes, r, lane_->comm(), stream));
      }
      from += out;
      to += in;
    }
    OPTIMUS_NCCL(*lane_, "all_to_all", ncclGroupEnd());
  }

  /// Edge i of the ring joins rank i and the next one; between two ranks there is one edge.
  int edges() const { return size() == 2 ? 1 : size(); }
  int phase_of(int edge) const { return size() % 2 == 1 && edge == size() - 1 ? 2 : edge % 2; }
  int phases() const { return size() == 2 ? 1 : 2 + size() % 2; }
  /// This rank's edge in a phase, or -1.
  int edge_in(int phase) const {
    for (const int edge : {rank(), (rank() + size() - 1) % size()})
      if (edge < edges() && phase_of(edge) == phase) return edge;
    return -1;
  }

  void connect_neighbours() {
    for (int phase = 0; phase < phases(); ++phase) {
      const int edge = edge_in(phase), next = (edge + 1) % size();
      for (const bool forward : {true, false}) {
        auto lane = std::make_unique<Lane>(group_, "ncclCommSplit", [&](ncclComm_t* comm) {
          return nccl().ncclCommSplit(lane_->comm(), edge < 0 ? NCCL_SPLIT_NOCOLOR : edge, rank(), comm, nullptr);
        });
        if (edge < 0) continue;
        const int from = forward ? edge : next, to = forward ? next : edge;
        // The lower rank of the group comes first in the lane.
        const int peer = rank() < from + to - rank() ? 1 : 0;
        use_once(*lane, peer, from == rank());
        message_lanes_.emplace(std::pair(from, to), MessageLane{std::move(lane), peer});
      }
    }
  }

  /// Connects both ends, and shows that they are.
  void use_once(Lane& lane, int peer, bool sends) {
    constexpr int64_t kCount = 256;
    CudaDevice& device = group_->device;
    void* data = device.allocate(kCount);
    lane.start("first message", kCount,
               [&] {
                 if (sends)
                   OPTIMUS_NCCL(lane, "start", ncclSend(data, kCount, kBytes, peer, lane.comm(), lane.stream()));
                 else OPTIMUS_NCCL(lane, "start", ncclRecv(data, kCount, kBytes, peer, lane.comm(), lane.stream()));
               })
        ->wait();
    lane.synchronise_wait();
    device.release(data, kCount);
  }

  const MessageLane& message_lane(int from, int to) const {
    const auto found = message_lanes_.find({from, to});
    expects(found != message_lanes_.end(), "group {} was made without messages from rank {} to {} of its {}",
            group_->name, from, to, size());
    return found->second;
  }

  std::shared_ptr<LaneGroup> group_;
  std::unique_ptr<Communicator> host_;
  std::unique_ptr<Lane> lane_;  ///< of the collectives
  std::map<std::pair<int, int>, MessageLane> message_lanes_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Processes& processes, Device& device, const std::string& name,
                                                     const std::vector<int>& ranks, Messages messages) {
  CudaDevice& cuda = cuda::as_cuda(device);
  std::unique_ptr<Communicator> host = processes.make_communicator(name, ranks);
  if (host->size() == 1)
    return make_self_communicator(
        [stream = cuda.stream()](void* to, const void* from, int64_t bytes) { copy_on(stream, to, from, bytes); });
  nccl();  // on every rank before the first waits for another one
  auto group = std::shared_ptr<LaneGroup>(new LaneGroup{cuda, processes.watchdog(), name, processes.rank()});
  return std::make_unique<NcclCommunicator>(std::move(group), std::move(host), messages);
}

}  // namespace optimus
