// Collectives over one group of ranks, on device memory. `self` is the group of one; `mpi`, `nccl` and `dry` stand
// behind the same calls.
#pragma once

#include <memory>

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

}  // namespace optimus
