// Collectives over one group of ranks, on device memory. `self` is the group of one; `mpi`, `nccl` and `dry` stand
// behind the same calls.
//
// A start_... call returns a Transfer; its tensors must stay untouched until wait(). Every rank of a group starts the
// same collectives in the same order. Sums add the ranks' values in rank order, f32 for f32 and bf16 (rounded once, at
// the end), f64 for f64, so that a result depends on the group only, and every rank gets the same bits. NCCL's sums give
// every rank the same bits, too, and the same bits again for the same group and shape, but add in an order of its own and
// round bf16 after each addition; two ranks get what MPI gives them.
//
// On a GPU "wait" means that the device's stream waits, never the host. A failure of the transport is Error(kCommunication) naming rank, group and operation.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "optimus/tensor/tensor.h"

namespace optimus {

/// A transfer under way. Destroying it waits, except while an exception passes: peers may then never come, and the run
/// is over (Processes::abort).
class Transfer {
 public:
  virtual ~Transfer() = default;
  /// The work that follows sees the result, and the tensors may be used again. Waiting twice is harmless.
  virtual void wait() = 0;
  /// Lets the transport do what it can without waiting (some make progress only when called).
  virtual void progress() {}
};
using Pending = std::unique_ptr<Transfer>;

/// Waits for the transfer, if there is one, and forgets it.
inline void finish(Pending& transfer) {
  if (transfer) transfer->wait();
  transfer.reset();
}

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// x = sum over ranks of x. f32, bf16, f64 or i32; contiguous. For small tensors: it goes through a bounded buffer.
  virtual void all_reduce(Tensor x) = 0;
  virtual void broadcast(Tensor x, int root) = 0;
  virtual void barrier() = 0;

  /// part = this rank's piece of the sum of `whole`; whole has size() pieces of part's length, and part may be this
  /// rank's piece of it (the other pieces are left undefined or as they were). f32 or bf16, contiguous. `scratch` has
  /// whole's type and length where reduce_needs_scratch(), and stays untouched until wait(), too.
  virtual Pending start_reduce_scatter(Tensor whole, Tensor part, Tensor scratch) = 0;
  virtual bool reduce_needs_scratch() const = 0;
  /// whole = the parts of all ranks, in rank order. part may be this rank's piece of whole. Any type, contiguous.
  virtual Pending start_all_gather(Tensor part, Tensor whole) = 0;
  /// Rows [sum of send_rows before r, + send_rows[r]) of `send` go to rank r; `receive` gets the rows from rank 0, then
  /// from rank 1, ..., receive_rows[r] from rank r. Counts are host numbers. Any type, contiguous rows; counts of zero
  /// and tensors without rows are fine. Send and receive do not overlap.
  virtual Pending start_all_to_all(Tensor send, std::span<const int64_t> send_rows, Tensor receive,
                                   std::span<const int64_t> receive_rows) = 0;
  /// Point to point; from one rank to another messages are received in the order in which they were sent. Any type, contiguous.
  virtual Pending start_send(Tensor x, int to) = 0;
  virtual Pending start_receive(Tensor x, int from) = 0;

  void reduce_scatter(Tensor whole, Tensor part, Tensor scratch) { start_reduce_scatter(whole, part, scratch)->wait(); }
  void all_gather(Tensor part, Tensor whole) { start_all_gather(part, whole)->wait(); }
};

/// Copies between two places of one memory, in order with the work there.
using CopyBytes = std::function<void(void* to, const void* from, int64_t bytes)>;
std::unique_ptr<Communicator> make_self_communicator(CopyBytes copy);
/// Over host memory.
std::unique_ptr<Communicator> make_self_communicator();

class Device;
class Processes;
/// Whether neighbours in a group, the last and the first rank among them, may send each other messages. On GPUs that costs
/// up to four communicators more.
enum class Messages : uint8_t { none, between_neighbours };
/// A communicator over the memory of GPUs, one a rank, for the given ranks, ascending, this one among them. Collective
/// over those ranks, a process's first one over all processes; a rank that belongs to several groups makes and destroys
/// them in the same order as its peers do. Error(kUsage) in a program that was built without CUDA.
std::unique_ptr<Communicator> make_nccl_communicator(Processes& processes, Device& device, const std::string& name,
                                                     const std::vector<int>& ranks, Messages messages);

/// What a rank of a planned group would have moved.
struct MessageRecord {
  std::string group;      ///< "dp", "ep", ...
  std::string operation;  ///< "reduce_scatter", ...
  double bytes;           ///< that this rank sends, with a ring for collectives
};
/// A rank of a group that exists in plans only; every call is added to `messages`, which must outlive it. Reductions over
/// MPI need scratch, those over NCCL do not.
std::unique_ptr<Communicator> make_dry_communicator(std::string group, int rank, int size,
                                                    std::vector<MessageRecord>& messages,
                                                    bool reduce_needs_scratch = true);

}  // namespace optimus
