// Grouped products on Hopper's tensor cores (wgmma and TMA, by CUTLASS's ptr-array kernels): D[g] = A[g] B[g]^T + beta D[g]
// for many groups at once, whose sizes only the device knows. A group is the rows of an expert. Operands are bf16, sums
// are f32. For CUDA sources only; CUTLASS's headers stay in hopper_grouped.cuh.
//
// One instance a source file, since each compiles for a minute. They exist where OPTIMUS_HOPPER_KERNELS is defined.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <set>
#include <tuple>

#include <cuda_runtime_api.h>

#include "optimus/ops/ops.h"

namespace optimus::cuda {

/// What the kernel reads on the device, one entry a group each; the set-up kernel of grouped_matmul.cu writes it. A stride
/// is the distance in elements along the dimension of the operand that is not contiguous, a multiple of 16 bytes as is
/// every pointer (TMA demands both).
///
/// A group may have M = 0. It may not have K = 0, since its accumulators would be stored uninitialised: its shape must be
/// (0, 0, 0), and its output is somebody else's work.
struct GroupArrays {
  int32_t* shape = nullptr;  ///< [groups, 3] = M, N, K
  const void** a = nullptr;  ///< [M, K]
  const void** b = nullptr;  ///< [N, K]
  void** d = nullptr;        ///< [M, N], row-major
  int64_t* a_stride = nullptr;
  int64_t* b_stride = nullptr;
  int64_t* d_stride = nullptr;
  std::byte* workspace = nullptr;  ///< where each block keeps the tensor maps of the group it works on
};

/// One kernel on one device.
class HopperProduct {
 public:
  virtual ~HopperProduct() = default;
  virtual int64_t workspace_bytes() const = 0;
  /// Nothing but a launch where the arrays are those of the last call. Only the weight gradients may accumulate.
  virtual void run(const GroupArrays& arrays, int groups, Write write, cudaStream_t stream) = 0;
};

std::unique_ptr<HopperProduct> make_hopper_forward(int device, int multiprocessors);
std::unique_ptr<HopperProduct> make_hopper_input(int device, int multiprocessors);
std::unique_ptr<HopperProduct> make_hopper_weight_bf16(int device, int multiprocessors);
std::unique_ptr<HopperProduct> make_hopper_weight_f32(int device, int multiprocessors);

/// What the grouped products of one CudaOps keep between calls: the kernels used so far, and what the log has been told.
struct GroupedKernels {
  enum Kind : int { kForward, kInput, kWeightBf16, kWeightF32, kKinds };

  /// Names in the log which way a product goes, once of each kind: by CUTLASS, or what is in the way. Literals only.
  void tell(const char* product, DType in, DType out, const char* obstacle);

  std::array<std::unique_ptr<HopperProduct>, kKinds> hopper;
  std::set<std::tuple<const char*, DType, DType, const char*>> told;
};

}  // namespace optimus::cuda
