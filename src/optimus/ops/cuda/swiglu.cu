// The gated activation a = silu(g) * u * gate, where h = (g, u) and silu(x) = x sigmoid(x), and its gradient:
//   dg = da * gate * u * s (1 + g (1 - s)),  du = da * gate * silu(g),  dgate = sum_f silu(g) u da,  s = sigmoid(g).
//
// A row belongs to a warp, or to a part of one where it is short; a thread has kUnits vectors of it in flight. Where no
// sum over the row is wanted, long rows are cut into pieces, so that few of them fill the device too.
#include "optimus/ops/cuda/kernels.cuh"

namespace optimus::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kUnits = 2;
// Blocks of a multiprocessor: enough loads in flight, and 64 or 128 registers a thread.
constexpr int kForwardBlocks = 8, kBackwardBlocks = 4;

template <typename T>
struct SwigluArguments {
  int64_t rows;              ///< of the tensors
  const int32_t* row_count;  ///< on the device, or null: all
  unsigned units;            ///< vectors of N in F
  unsigned pieces;           ///< that a row is cut into
  int lane_bits;             ///< a row has 2^lane_bits lanes
  const float* gates;
  const int32_t* slots;
  const T* h;
  int64_t h_pitch;
  T* a;
  int64_t a_pitch;
  // Backward.
  const T* da;
  int64_t da_pitch;
  T* dh;
  int64_t dh_pitch;
  float* dgates;
};

/// f32 results keep f32's accuracy; bf16's take the fast exponential and division, good to about 1e-6.
template <typename T>
__device__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) return 1.0f / (1.0f + expf(-x));
  else return __fdividef(1.0f, 1.0f + __expf(-x));
}

/// What a thread works on: units [first, end) in steps of `lanes`, of one row.
struct Share {
  int64_t row;
  bool inside;
  unsigned first, end, lanes;
};
template <typename T>
__device__ Share share_of_thread(const SwigluArguments<T>& a) {
  const unsigned lanes = 1u << a.lane_bits, lane = threadIdx.x & (lanes - 1);
  const unsigned row_block = blockIdx.x / a.pieces, piece = blockIdx.x - row_block * a.pieces;
  const int64_t row = int64_t(row_block) * (kThreads >> a.lane_bits) + (threadIdx.x >> a.lane_bits);
  const int64_t rows = a.row_count ? min(int64_t(*a.row_count), a.rows) : a.rows;
  const unsigned length = a.pieces == 1 ? a.units : lanes * kUnits, begin = piece * length;
  return {row, row < rows, begin + lane, min(begin + length, a.units), lanes};
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads, kForwardBlocks) swiglu_kernel(SwigluArguments<T> a) {
  const Share share = share_of_thread(a);
  if (!share.inside) return;
  const T* h = a.h + share.row * a.h_pitch;
  const T* h_up = h + int64_t(a.units) * N;
  T* out = a.a + share.row * a.a_pitch;
  const int64_t slot = a.gates ? a.slots[share.row] : 0;
  for (unsigned base = share.first; base < share.end; base += share.lanes * kUnits) {
    Vector<T, N> g[kUnits], u[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const unsigned unit = base + unsigned(i) * share.lanes;
      if (unit >= share.end) continue;
      g[i] = load_vector<T, N>(h + int64_t(unit) * N);
      u[i] = load_vector<T, N>(h_up + int64_t(unit) * N);
    }
    const float gate = a.gates ? a.gates[slot] : 1.0f;  // here, so that h's loads do not wait for the slot's
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const unsigned unit = base + unsigned(i) * share.lanes;
      if (unit >= share.end) continue;
      Vector<T, N> result;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float x = to_float(g[i][j]);
        result[j] = from_float<T>(x * sigmoid<T>(x) * to_float(u[i][j]) * gate);
      }
      store_vector(out + int64_t(unit) * N, result);
    }
  }
}

/// dh may be h: a unit's g and u are read before its dg and du are written, by one thread.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks) swiglu_backward_kernel(SwigluArguments<T> a) {
  const Share share = share_of_thread(a);
  float dgate = 0.0f;
  int64_t slot = 0;
  if (share.inside) {
    const int64_t width = int64_t(a.units) * N;
    const T* h = a.h + share.row * a.h_pitch;
    const T* da = a.da + share.row * a.da_pitch;
    T* dh = a.dh + share.row * a.dh_pitch;
    T* out = a.a ? a.a + share.row * a.a_pitch : nullptr;
    if (a.slots) slot = a.slots[share.row];
    for (unsigned base = share.first; base < share.end; base += share.lanes * kUnits) {
      Vector<T, N> g[kUnits], u[kUnits], d[kUnits];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const unsigned unit = base + unsigned(i) * share.lanes;
        if (unit >= share.end) continue;
        g[i] = load_vector<T, N>(h + int64_t(unit) * N);
        u[i] = load_vector<T, N>(h + width + int64_t(unit) * N);
        d[i] = load_vector<T, N>(da + int64_t(unit) * N);
      }
      const float gate = a.gates ? a.gates[slot] : 1.0f;  // here, so that other loads do not wait for the slot's
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const unsigned unit = base + unsigned(i) * share.lanes;
        if (unit >= share.end) continue;
        Vector<T, N> dg, du, result;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float x = to_float(g[i][j]), up = to_float(u[i][j]), gradient = to_float(d[i][j]);
          const float s = sigmoid<T>(x), silu = x * s;
          dgate += silu * up * gradient;
          result[j] = from_float<T>(silu * up * gate);
          dg[j] = from_float<T>(gradient * gate * up * s * (1.0f + x * (1.0f - s)));
          du[j] = from_float<T>(gradient * gate * silu);
        }
        store_vector(dh + int64_t(unit) * N, dg);
        store_vector(dh + width + int64_t(unit) * N, du);
        if (out) store_vector(out + int64_t(unit) * N, result);
      }
    }
  }
  if (!a.dgates) return;
  for (unsigned offset = share.lanes / 2; offset > 0; offset /= 2) dgate += __shfl_xor_sync(kAllLanes, dgate, offset);
  if (share.inside && (threadIdx.x & (share.lanes - 1)) == 0) a.dgates[slot] = dgate;
}

template <typename T>
SwigluArguments<T> arguments_of(const Tensor& h, const Tensor& gates, const Tensor& slots, const Tensor& rows,
                                const Tensor& a, bool whole, bool row_sums) {
  SwigluArguments<T> out{};
  const int64_t units = h.columns() / 2 / (whole ? kVectorWidth<T> : 1);
  expects(units < (int64_t(1) << 30), "swiglu of {} columns", h.columns());
  out.rows = h.rows();
  out.row_count = rows ? rows.as<int32_t>() : nullptr;
  out.units = unsigned(units);
  while (out.lane_bits < 5 && (1 << out.lane_bits) < units) ++out.lane_bits;
  out.pieces = row_sums ? 1 : unsigned(ceil_div(units, int64_t(kUnits) << out.lane_bits));
  out.gates = gates ? gates.as<float>() : nullptr;
  out.slots = slots ? slots.as<int32_t>() : nullptr;
  out.h = pointer<const T>(h), out.h_pitch = h.pitch;
  out.a = pointer<T>(a), out.a_pitch = a.pitch;
  return out;
}

template <typename T>
int64_t blocks_of(const SwigluArguments<T>& a) {
  return ceil_div(a.rows, kThreads >> a.lane_bits) * a.pieces;
}

}  // namespace

void CudaOps::swiglu(Tensor h_R2F, Tensor gates, Tensor slots, Tensor rows, Tensor a_RF) {
  if (h_R2F.rows() == 0) return;
  with_real(h_R2F.dtype, [&](auto type) {
    using T = decltype(type);
    const bool whole = whole_vectors(a_RF) && whole_vectors(h_R2F);
    const SwigluArguments<T> arguments = arguments_of<T>(h_R2F, gates, slots, rows, a_RF, whole, false);
    launch(whole ? swiglu_kernel<T, kVectorWidth<T>> : swiglu_kernel<T, 1>, blocks_of(arguments), kThreads, 0, stream_,
           arguments);
  });
}

void CudaOps::swiglu_backward(Tensor h_R2F, Tensor da_RF, Tensor gates, Tensor slots, Tensor rows, Tensor dh_R2F,
                              Tensor a_RF, Tensor dgates) {
  if (h_R2F.rows() == 0) return;
  with_real(h_R2F.dtype, [&](auto type) {
    using T = decltype(type);
    const bool whole =
        whole_vectors(da_RF) && whole_vectors(h_R2F) && whole_vectors(dh_R2F) && (!a_RF || whole_vectors(a_RF));
    SwigluArguments<T> arguments = arguments_of<T>(h_R2F, gates, slots, rows, a_RF, whole, bool(dgates));
    arguments.da = pointer<const T>(da_RF), arguments.da_pitch = da_RF.pitch;
    arguments.dh = pointer<T>(dh_R2F), arguments.dh_pitch = dh_R2F.pitch;
    arguments.dgates = dgates ? dgates.as<float>() : nullptr;
    launch(whole ? swiglu_backward_kernel<T, kVectorWidth<T>> : swiglu_backward_kernel<T, 1>, blocks_of(arguments),
           kThreads, 0, stream_, arguments);
  });
}

}  // namespace optimus::cuda
