// Weighted cross-entropy over the vocabulary and its gradient, which replaces the logits:
//   loss = sum_t weight (lse - logit[target]),  dlogits = scale weight (e^(logit - lse) - onehot).
//
// One block a row. Its threads keep a running maximum m and s = sum e^(logit - m) of what they read, which is rescaled
// where m grows; the block joins them. Meanwhile the row stays in shared memory as far as it fits, so that the second
// pass, which needs the joined sum, does not read it again; two blocks a multiprocessor let one compute while the other
// reads. Rows' losses are added in double by a second kernel, in one order.
#include "optimus/ops/cuda/kernels.cuh"

namespace optimus::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kLoads = 4;                  ///< of a thread, in flight
constexpr int64_t kKeptBytes = 112 << 10;  ///< of a row: two of them and what else blocks need fill shared memory
constexpr int kSumThreads = 1024;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLowest = -1e30f;  ///< below all logits, but a number: its difference to itself is 0

/// e^x for x <= 0, for logits of type T: for bf16 within 1e-5, of which results keep 4e-3.
template <typename T>
__device__ float exponential(float x) {
  if constexpr (sizeof(T) == 2) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * kLog2e));
    return power;
  } else {
    return expf(x);
  }
}

/// Maximum and sum of e^(x - maximum) of the logits seen so far.
template <typename T>
struct Running {
  float maximum = kLowest, sum = 0.0f;

  template <int N>
  __device__ void add(const Vector<T, N>& logits) {
    float larger = maximum;
#pragma unroll
    for (int i = 0; i < N; ++i) larger = fmaxf(larger, to_float(logits[i]));
    float part = sum * exponential<T>(maximum - larger);
#pragma unroll
    for (int i = 0; i < N; ++i) part += exponential<T>(to_float(logits[i]) - larger);
    sum = part;
    maximum = larger;
  }
};

/// N logits an access. The first `kept` accesses of the row are kept in shared memory; each thread reads there only what
/// it wrote itself.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_kernel(T* all_logits, int64_t pitch, int64_t vocab, const int32_t* targets, const float* weights,
                         float scale, double* losses, int kept) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* row = reinterpret_cast<T*>(shared);
  const int64_t t = blockIdx.x;
  T* logits = all_logits + t * pitch;
  const float weight = weights[t];
  const int accesses = int(vocab / N), thread = int(threadIdx.x), threads = int(blockDim.x);

  if (weight == 0.0f) {
    if (scale != 0.0f) {
      Vector<T, N> zeros;
#pragma unroll
      for (int i = 0; i < N; ++i) zeros[i] = from_float<T>(0.0f);
      for (int a = thread; a < accesses; a += threads) store_vector<T, N>(logits + int64_t(a) * N, zeros);
    }
    if (thread == 0) losses[t] = 0.0;
    return;
  }

  const int32_t target = targets[t];
  const float target_logit = to_float(logits[target]);  // before anybody writes: the sums below are barriers
  Running<T> running;
  const auto take = [&](int a, const Vector<T, N>& values) {
    running.add(values);
    if (a < kept) store_vector<T, N>(row + int64_t(a) * N, values);
  };
  int access = thread;
  for (; access + (kLoads - 1) * threads < accesses; access += kLoads * threads) {
    Vector<T, N> values[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) values[k] = load_vector<T, N>(logits + int64_t(access + k * threads) * N);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) take(access + k * threads, values[k]);
  }
  for (; access < accesses; access += threads) take(access, load_vector<T, N>(logits + int64_t(access) * N));

  const float maximum = reduce_block(running.maximum, Max{});
  const float sum = reduce_block(running.sum * expf(running.maximum - maximum), Sum{});
  if (thread == 0) losses[t] = double(weight) * (double(maximum) + log(double(sum)) - double(target_logit));
  if (scale == 0.0f) return;

  const float factor = scale * weight, share = factor / sum;
  const int target_access = int(target / N), target_place = int(target % N);
  const auto replace = [&](int a, Vector<T, N> values) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float gradient = share * exponential<T>(to_float(values[i]) - maximum);
      if (a == target_access && i == target_place) gradient -= factor;
      values[i] = from_float<T>(gradient);
    }
    store_vector<T, N>(logits + int64_t(a) * N, values);
  };
  int a = thread;
#pragma unroll 2
  for (; a < kept; a += threads) replace(a, load_vector<T, N>(row + int64_t(a) * N));
  for (; a < accesses; a += threads) replace(a, load_vector<T, N>(logits + int64_t(a) * N));
}

__global__ void __launch_bounds__(kSumThreads) add_losses_kernel(const double* losses, int64_t count, double* loss) {
  double sum = 0;
  for (int64_t t = threadIdx.x; t < count; t += kSumThreads) sum += losses[t];
  sum = reduce_block(sum, Sum{});
  if (threadIdx.x == 0) *loss += sum;
}

}  // namespace

void CudaOps::cross_entropy(Tensor logits_TV, Tensor targets_T, Tensor weights_T, float scale, Tensor loss) {
  const int64_t tokens = logits_TV.rows(), vocab = logits_TV.columns();
  if (tokens == 0) return;
  scratch_.begin();
  double* losses = scratch_.take<double>(tokens);
  int shared_bytes = 0;  // that a block of this device can have
  OPTIMUS_CUDA(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_.index()));
  const int64_t kept_bytes = std::min<int64_t>(kKeptBytes, shared_bytes - 1024);
  with_real(logits_TV.dtype, [&]<typename T>(T) {
    const auto run = [&]<int N>(std::integral_constant<int, N>) {
      const int64_t accesses = vocab / N;
      const int64_t kept = scale == 0.0f ? 0 : std::min(accesses, kept_bytes / int64_t(sizeof(T)) / N);
      const int threads = int(std::min<int64_t>(kThreads, ceil_div(accesses, kWarp) * kWarp));
      OPTIMUS_CUDA(cudaFuncSetAttribute(cross_entropy_kernel<T, N>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        int(kept_bytes)));
      launch(cross_entropy_kernel<T, N>, tokens, threads, size_t(kept * N) * sizeof(T), stream_, pointer<T>(logits_TV),
             logits_TV.pitch, vocab, targets_T.as<int32_t>(), weights_T.as<float>(), scale, losses, kept);
    };
    if (whole_vectors(logits_TV)) run(std::integral_constant<int, kVectorWidth<T>>{});
    else run(std::integral_constant<int, 1>{});
  });
  launch(add_losses_kernel, 1, kSumThreads, 0, stream_, losses, tokens, loss.as<double>());
}

}  // namespace optimus::cuda
