// Products of rows grouped by expert, and their gradients: rows(e) = [offsets[e], offsets[e+1]), offsets on the device,
//   forward  y[rows(e)]  = x[rows(e)] w[e]^T        input  dx[rows(e)] = dy[rows(e)] w[e]
//   weight   dw[e] (+)= dy[rows(e)]^T x[rows(e)]
//
// Two ways. On Hopper, bf16 operands whose rows are whole 16-byte vectors go to CUTLASS's grouped kernels (hopper_grouped.h):
// two launches, a small one that turns offsets into the kernel's arrays of shapes, addresses and strides, and the
// product. Everything else goes to own kernels (portable_grouped.h) in one launch. The host never learns how many rows an
// expert has.
#include <algorithm>

#include "optimus/ops/cuda/hopper_grouped.h"
#include "optimus/ops/cuda/kernels.cuh"
#include "optimus/ops/cuda/portable_grouped.h"

namespace optimus::cuda {
namespace {

/// What a product needs of CudaOps.
struct Context {
  const CudaDevice& device;
  cudaStream_t stream;
  Scratch& scratch;
  GroupedKernels& kernels;
};

#ifdef OPTIMUS_HOPPER_KERNELS

constexpr bool kHopperKernels = true;
constexpr int kThreads = 256;
/// Blocks that zero gradients, over all experts: enough to use the whole GPU's bandwidth where a few are empty.
constexpr int64_t kZeroingBlocks = 1024, kLeastParts = 8, kMostParts = 256;

/// An operand of all experts: where the first one's begins, and how far on the next item is. For operands by rows an item
/// is a row, for weights it is an expert's matrix.
struct Operand {
  std::byte* data;
  int64_t pitch;  ///< elements from one row to the next
  int64_t item_bytes;
};

Operand by_rows(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data), tensor.pitch, tensor.pitch * size_of(tensor.dtype)};
}

Operand by_expert(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data), tensor.pitch, tensor.shape[1] * tensor.pitch * size_of(tensor.dtype)};
}

__device__ void* at(const Operand& operand, int64_t item) { return operand.data + item * operand.item_bytes; }

/// One thread an expert. An expert without rows gets the shape (0, n, k): no tiles.
__global__ void set_up_rows(GroupArrays arrays, const int32_t* offsets, int groups, Operand from, Operand weight,
                            Operand to, int n, int k) {
  const int e = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (e >= groups) return;
  const int begin = offsets[e];
  arrays.shape[3 * e] = offsets[e + 1] - begin;
  arrays.shape[3 * e + 1] = n;
  arrays.shape[3 * e + 2] = k;
  arrays.a[e] = at(from, begin);
  arrays.b[e] = at(weight, e);
  arrays.d[e] = at(to, begin);
  arrays.a_stride[e] = from.pitch;
  arrays.b_stride[e] = weight.pitch;
  arrays.d_stride[e] = to.pitch;
}

/// An expert's gradient as lines of 16-byte vectors, to be zeroed where it has no rows; no lines: it is left as it is.
struct Lines {
  int64_t count, vectors, pitch;
};

/// `parts` blocks an expert. The first writes its entries; an expert without rows is left out of the product (sums over no
/// rows would be garbage), and its blocks zero its gradient. The others leave at once.
__global__ void set_up_weight(GroupArrays arrays, const int32_t* offsets, int parts, Operand dy, Operand x, Operand dw,
                              int n, int k, Lines lines) {
  const int e = int(blockIdx.x) / parts, part = int(blockIdx.x) % parts;
  const int begin = offsets[e], rows = offsets[e + 1] - begin;
  if (part == 0 && threadIdx.x == 0) {
    arrays.shape[3 * e] = rows > 0 ? n : 0;
    arrays.shape[3 * e + 1] = rows > 0 ? k : 0;
    arrays.shape[3 * e + 2] = rows;
    arrays.a[e] = at(dy, begin);
    arrays.b[e] = at(x, begin);
    arrays.d[e] = at(dw, e);
    arrays.a_stride[e] = dy.pitch;
    arrays.b_stride[e] = x.pitch;
    arrays.d_stride[e] = dw.pitch;
  }
  if (rows > 0) return;
  uint4* const out = static_cast<uint4*>(at(dw, e));
  const int64_t first = int64_t(part) * blockDim.x + threadIdx.x, step = int64_t(parts) * blockDim.x;
  for (int64_t line = 0; line < lines.count; ++line)
    for (int64_t i = first; i < lines.vectors; i += step) out[line * lines.pitch + i] = make_uint4(0, 0, 0, 0);
}

HopperProduct& kernel_of(const Context& context, GroupedKernels::Kind kind) {
  std::unique_ptr<HopperProduct>& kernel = context.kernels.hopper[kind];
  if (!kernel) {
    const auto make = kind == GroupedKernels::kForward      ? make_hopper_forward
                      : kind == GroupedKernels::kInput      ? make_hopper_input
                      : kind == GroupedKernels::kWeightBf16 ? make_hopper_weight_bf16
                                                            : make_hopper_weight_f32;
    kernel = make(context.device.index(), context.device.multiprocessors());
  }
  return *kernel;
}

/// In the order that makes their addresses a function of the number of groups: HopperProduct::run() relies on it.
GroupArrays take_arrays(Scratch& scratch, int groups, const HopperProduct& product) {
  scratch.begin();
  GroupArrays arrays;
  arrays.shape = scratch.take<int32_t>(3 * int64_t(groups));
  arrays.a = scratch.take<const void*>(groups);
  arrays.b = scratch.take<const void*>(groups);
  arrays.d = scratch.take<void*>(groups);
  arrays.a_stride = scratch.take<int64_t>(groups);
  arrays.b_stride = scratch.take<int64_t>(groups);
  arrays.d_stride = scratch.take<int64_t>(groups);
  arrays.workspace = scratch.take<std::byte>(product.workspace_bytes());
  return arrays;
}

void hopper_rows(const Context& context, const Tensor& from, const Tensor& w, Transpose tw, const Tensor& offsets,
                 const Tensor& to) {
  HopperProduct& product = kernel_of(context, tw == Transpose::yes ? GroupedKernels::kForward : GroupedKernels::kInput);
  const int groups = int(w.shape[0]);
  const GroupArrays arrays = take_arrays(context.scratch, groups, product);
  launch(set_up_rows, ceil_div(groups, kThreads), kThreads, 0, context.stream, arrays, offsets.as<int32_t>(), groups,
         by_rows(from), by_expert(w), by_rows(to), int(to.columns()), int(from.columns()));
  product.run(arrays, groups, Write::overwrite, context.stream);
}

void hopper_weight(const Context& context, const Tensor& dy, const Tensor& x, const Tensor& offsets, const Tensor& dw,
                   Write write) {
  HopperProduct& product =
      kernel_of(context, dw.dtype == DType::f32 ? GroupedKernels::kWeightF32 : GroupedKernels::kWeightBf16);
  const int groups = int(dw.shape[0]);
  const GroupArrays arrays = take_arrays(context.scratch, groups, product);
  const int64_t n = dw.shape[1], k = dw.shape[2], width = 16 / size_of(dw.dtype);
  int64_t parts = 1;
  Lines lines{};
  if (write == Write::overwrite) {
    parts = std::clamp(ceil_div(kZeroingBlocks, groups), kLeastParts, kMostParts);
    lines = dw.pitch == k ? Lines{1, n * k / width, 0} : Lines{n, k / width, dw.pitch / width};
  }
  launch(set_up_weight, groups * parts, kThreads, 0, context.stream, arrays, offsets.as<int32_t>(), parts, by_rows(dy),
         by_rows(x), by_expert(dw), n, k, lines);
  product.run(arrays, groups, write, context.stream);
}

#else
constexpr bool kHopperKernels = false;
#endif

/// Below this width the kernels' tiles of 128x256 would be padding for the most part.
constexpr int64_t kLeastWidth = 64;

/// TMA's demands on a tensor: its address and the distance of its rows are multiples of 16 bytes, also of a single row.
bool tma_can_read(const Tensor& tensor) {
  return whole_vectors(tensor) && tensor.pitch >= tensor.columns() && tensor.pitch * size_of(tensor.dtype) % 16 == 0;
}

/// Why a product cannot go to the Hopper kernels; nullptr where it can. `w` is the weight or its gradient.
const char* obstacle(const CudaDevice& device, const Tensor& left, const Tensor& right, const Tensor& w) {
  if (!kHopperKernels) return "the program was built without Hopper kernels";
  if (device.architecture() != 90) return "the GPU is not a Hopper";
  if (left.dtype != DType::bf16 || right.dtype != DType::bf16) return "operands are not bf16";
  if (w.shape[1] < kLeastWidth || w.shape[2] < kLeastWidth) return "narrow experts";
  if (!tma_can_read(left) || !tma_can_read(right) || !tma_can_read(w)) return "rows not divisible by 16 bytes";
  return nullptr;
}

/// tw is yes for the forward product, no for the input gradient.
void multiply_rows(const Context& context, const Tensor& from, const Tensor& w_LNK, Transpose tw, const Tensor& offsets,
                   const Tensor& to) {
  if (from.shape[0] == 0 || to.elements() == 0 || offsets.elements() <= 1) return;
  const bool forward = tw == Transpose::yes;
  expects(w_LNK.shape.rank() == 3 && w_LNK.shape[0] == offsets.elements() - 1 &&
              w_LNK.shape[forward ? 2 : 1] == from.columns() && w_LNK.shape[forward ? 1 : 2] == to.columns() &&
              from.dtype == w_LNK.dtype && from.dtype == to.dtype,
          "grouped product of {} with {} into {}", from.shape, w_LNK.shape, to.shape);
  const char* const reason = obstacle(context.device, from, to, w_LNK);
  context.kernels.tell(forward ? "product" : "input gradient", from.dtype, to.dtype, reason);
  if (reason != nullptr) return portable_grouped_rows(context.stream, from, w_LNK, tw, offsets, to);
#ifdef OPTIMUS_HOPPER_KERNELS
  hopper_rows(context, from, w_LNK, tw, offsets, to);
#endif
}

}  // namespace

void CudaOps::grouped_matmul(Tensor x_RK, Tensor w_LNK, const RouteIndex& index, Tensor y_RN) {
  multiply_rows({device_, stream_, scratch_, *grouped_}, x_RK, w_LNK, Transpose::yes, index.offsets_L1, y_RN);
}

void CudaOps::grouped_matmul_input(Tensor dy_RN, Tensor w_LNK, const RouteIndex& index, Tensor dx_RK) {
  multiply_rows({device_, stream_, scratch_, *grouped_}, dy_RN, w_LNK, Transpose::no, index.offsets_L1, dx_RK);
}

void CudaOps::grouped_matmul_weight(Tensor dy_RN, Tensor x_RK, const RouteIndex& index, Tensor dw_LNK, Write write) {
  if (dw_LNK.elements() == 0) return;
  expects(dw_LNK.shape.rank() == 3 && dw_LNK.shape[0] == index.offsets_L1.elements() - 1 &&
              dw_LNK.shape[1] == dy_RN.columns() && dw_LNK.shape[2] == x_RK.columns() && dy_RN.dtype == x_RK.dtype,
          "grouped weight gradient of {} and {} into {}", dy_RN.shape, x_RK.shape, dw_LNK.shape);
  if (x_RK.rows() == 0) {  // there is no buffer that TMA could be pointed at
    if (write == Write::overwrite) fill(dw_LNK, 0);
    return;
  }
  const char* const reason = obstacle(device_, dy_RN, x_RK, dw_LNK);
  grouped_->tell("weight gradient", dy_RN.dtype, dw_LNK.dtype, reason);
  if (reason != nullptr) return portable_grouped_weight(stream_, dy_RN, x_RK, index.offsets_L1, dw_LNK, write);
#ifdef OPTIMUS_HOPPER_KERNELS
  hopper_weight({device_, stream_, scratch_, *grouped_}, dy_RN, x_RK, index.offsets_L1, dw_LNK, write);
#endif
}

}  // namespace optimus::cuda
