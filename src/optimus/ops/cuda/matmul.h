// Dense products by cuBLASLt. For CUDA sources only.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "optimus/ops/cuda/scratch.h"
#include "optimus/ops/ops.h"
#include "optimus/tensor/cuda/cuda_device.h"

namespace optimus::cuda {

/// The library's handle, and the algorithm chosen for each product seen so far.
///
/// cuBLASLt ranks its algorithms for a product by an estimate. The first of them is taken, unless a table of choices says
/// which one was measured to be the fastest: a place in that list. Lists change with the library and the GPU, hence
/// choices_header().
class Matmuls {
 public:
  using Choices = std::map<std::string, int>;

  explicit Matmuls(CudaDevice& device);
  ~Matmuls();
  Matmuls(const Matmuls&) = delete;
  Matmuls& operator=(const Matmuls&) = delete;

  /// See Ops::matmul; M, N and K are at least 1, and f32 operands have an f32 result.
  void run(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend, Scratch& scratch);

  /// Names the GPU and the library: a table made under another header must not be used.
  std::string choices_header() const;
  const Choices& choices() const;
  /// From now on. Products that are not in the table keep the first algorithm.
  void set_choices(Choices choices);
  /// Whether the table has it.
  bool chosen(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend) const {
    return choices().contains(key(a, ta, b, tb, y, addend));
  }
  /// Times the product's algorithms on these tensors, and waits for it; y is left with a meaningless result. The
  /// table then holds the fastest. It is what the timing says, so two calls may differ, and with them the last bits of
  /// results: keep the table.
  void tune(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend, Scratch& scratch);

 private:
  /// By which a table knows the product: shapes, pitches, types, alignments.
  std::string key(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend) const;

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace optimus::cuda
