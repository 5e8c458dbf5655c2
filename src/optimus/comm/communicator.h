// Collectives over one group of ranks, on device memory. `self` is the group of one; `mpi`, `nccl` and `dry` stand
// behind the same calls.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "optimus/tensor/tensor.h"

namespace optimus {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  /// x = sum over ranks of x, the same bits on every rank. f32, bf16 (summed in f32), f64 or i32.
  virtual void all_reduce(Tensor x) = 0;
  /// part = this rank's piece of the sum of `whole`; whole has size() pieces of part's length.
  virtual void reduce_scatter(Tensor whole, Tensor part) = 0;
  /// whole = the parts of all ranks, in rank order.
  virtual void all_gather(Tensor part, Tensor whole) = 0;
  virtual void broadcast(Tensor x, int root) = 0;
  virtual void barrier() = 0;
};

std::unique_ptr<Communicator> make_self_communicator();

struct MessageRecord {
  std::string_view operation;
  double bytes;  ///< that the rank sends, with a ring
};
/// A rank of a group that exists in plans only; every call is added to `messages`, which must outlive it.
std::unique_ptr<Communicator> make_dry_communicator(int rank, int size, std::vector<MessageRecord>& messages);

}  // namespace optimus
