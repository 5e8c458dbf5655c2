// The CUTLASS kernel behind hopper_grouped.h, for the four source files that instantiate it.
//
// The kernel is persistent: each block walks over the output tiles of all groups, and rewrites its own tensor maps (of A, B,
// D, and C where it accumulates) whenever it comes to another group. Each map has the group's own M, N and K as
// its bounds. So a tile that reaches past a group's last row loads zeros there instead of the next expert's rows, and TMA
// drops what would be stored there: nothing but the group's rows is written.
//
// Tile 128x256x64, two consumer warpgroups, and pairs of blocks along M that share B's tiles by multicast: of the shapes
// that fit, the one that moves the fewest bytes from L2 and shared memory a product.
#pragma once

#include <bit>
#include <optional>

#include <cute/tensor.hpp>
#include <cutlass/bfloat16.h>
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "optimus/ops/cuda/hopper_grouped.h"
#include "optimus/tensor/cuda/runtime.h"

namespace optimus::cuda {

/// What CUTLASS calls the layouts: of A [M,K] and of B [N,K], by the dimension that is contiguous.
using KMajorA = cutlass::layout::RowMajor;
using MMajorA = cutlass::layout::ColumnMajor;
using KMajorB = cutlass::layout::ColumnMajor;
using NMajorB = cutlass::layout::RowMajor;

/// `Source` is the type of C, which is then D itself, or void for a kernel that cannot accumulate.
template <class LayoutA, class LayoutB, class Source, class Output>
struct HopperKernel {
  using Element = cutlass::bfloat16_t;
  using Tile = cute::Shape<cute::_128, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Problem = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
  static constexpr int kOperandAlignment = 16 / int(sizeof(Element));
  static constexpr int kOutputAlignment = 16 / int(sizeof(Output));

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Source, cutlass::layout::RowMajor*,
      kOutputAlignment, Output, cutlass::layout::RowMajor*, kOutputAlignment,
      cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
      cutlass::epilogue::fusion::LinearCombination<Output, float, Source, float>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA*, kOperandAlignment, Element, LayoutB*,
      kOperandAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
};

template <class LayoutA, class LayoutB, class Source, class Output>
class HopperProductOf final : public HopperProduct {
  using Types = HopperKernel<LayoutA, LayoutB, Source, Output>;
  using Kernel = typename Types::Kernel;
  using Element = typename Types::Element;
  using Shape3 = typename Types::Problem::UnderlyingProblemShape;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideD = typename Kernel::InternalStrideD;

  // The set-up kernel writes plain integers where CUTLASS reads its tuples.
  static_assert(sizeof(Shape3) == 3 * sizeof(int32_t) && sizeof(StrideA) == sizeof(int64_t) &&
                sizeof(StrideB) == sizeof(int64_t) && sizeof(StrideD) == sizeof(int64_t));

 public:
  HopperProductOf(int device, int multiprocessors) {
    hardware_.device_id = device;
    hardware_.sm_count = multiprocessors;  // otherwise CUTLASS asks the driver at each call
    const auto order = std::bit_cast<std::array<int32_t, 3>>(Shape3{1, 2, 3});
    expects(order == std::array<int32_t, 3>{1, 2, 3}, "CUTLASS's shapes lie in memory as ({}, {}, {})", order[0],
            order[1], order[2]);
    OPTIMUS_CUDA(cudaFuncSetAttribute(kernel(), cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    workspace_bytes_ = int64_t(Kernel::get_workspace_size(arguments({}, 1, Write::overwrite)));
  }

  int64_t workspace_bytes() const override { return workspace_bytes_; }

  // Encoding tensor maps is the dear part of a launch on the host. CUTLASS does it four times a call, but the device
  // replaces their addresses, bounds and strides anyway: they depend on the arrays' addresses only.
  void run(const GroupArrays& arrays, int groups, Write write, cudaStream_t stream) override {
    if (!params_ || arrays.shape != shape_ || arrays.workspace != workspace_ || groups != groups_ || write != write_) {
      params_ = Kernel::to_underlying_arguments(arguments(arrays, groups, write), arrays.workspace);
      shape_ = arrays.shape;
      workspace_ = arrays.workspace;
      groups_ = groups;
      write_ = write;
    }
    using Cluster = typename Types::Cluster;
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = unsigned(cute::size<0>(Cluster{}));
    cluster.val.clusterDim.y = unsigned(cute::size<1>(Cluster{}));
    cluster.val.clusterDim.z = unsigned(cute::size<2>(Cluster{}));
    cudaLaunchConfig_t config{};
    config.gridDim = Kernel::get_grid_shape(*params_);
    config.blockDim = Kernel::get_block_shape();
    config.dynamicSmemBytes = kSharedBytes;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    void* parameters[] = {&*params_};
    OPTIMUS_CUDA(cudaLaunchKernelExC(&config, kernel(), parameters));
  }

 private:
  static constexpr int kSharedBytes = Kernel::SharedStorageSize;

  static const void* kernel() { return reinterpret_cast<const void*>(&cutlass::device_kernel<Kernel>); }

  typename Kernel::Arguments arguments(const GroupArrays& arrays, int groups, Write write) const {
    typename Kernel::Arguments out{};
    out.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    out.problem_shape = {groups, reinterpret_cast<Shape3*>(arrays.shape), nullptr};
    out.mainloop.ptr_A = reinterpret_cast<const Element**>(arrays.a);
    out.mainloop.dA = reinterpret_cast<StrideA*>(arrays.a_stride);
    out.mainloop.ptr_B = reinterpret_cast<const Element**>(arrays.b);
    out.mainloop.dB = reinterpret_cast<StrideB*>(arrays.b_stride);
    out.epilogue.ptr_D = reinterpret_cast<Output**>(arrays.d);
    out.epilogue.dD = reinterpret_cast<StrideD*>(arrays.d_stride);
    out.epilogue.thread.alpha = 1.0f;
    out.epilogue.thread.beta = 0.0f;  // C is then not read at all
    if constexpr (!std::is_void_v<Source>) {
      out.epilogue.ptr_C = reinterpret_cast<const Source**>(const_cast<const void**>(arrays.d));
      out.epilogue.dC = reinterpret_cast<StrideD*>(arrays.d_stride);
      if (write == Write::accumulate) out.epilogue.thread.beta = 1.0f;
    } else {
      expects(write == Write::overwrite, "this grouped product cannot accumulate");
    }
    out.hw_info = hardware_;
    return out;
  }

  cutlass::KernelHardwareInfo hardware_{};
  int64_t workspace_bytes_ = 0;
  // The call that params_ was made for. The other arrays lie at fixed distances from `shape`.
  std::optional<typename Kernel::Params> params_;
  const int32_t* shape_ = nullptr;
  const std::byte* workspace_ = nullptr;
  int groups_ = 0;
  Write write_ = Write::overwrite;
};

}  // namespace optimus::cuda
