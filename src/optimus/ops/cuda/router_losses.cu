// The router's statistics, its gradient, and the balance loss; formulas in router.cuh.
//
// Statistics: blocks sum chunks of a unit's tokens; where units have several, a second kernel adds those in order.
// Backward: a token belongs to a warp, which holds its scores' gradients in shared memory.
#include <algorithm>

#include "optimus/ops/cuda/router.cuh"

namespace optimus::cuda {
namespace {

constexpr int kStatisticsThreads = 256;
constexpr int kBalanceThreads = 1024;
constexpr int64_t kMostPartialBytes = kScratchBytes / 4 * 3;

// ---- statistics ----

struct StatisticsArguments {
  int64_t tokens, unit_tokens, unit_chunks, chunk_tokens;
  int experts, top_k;
  int width;  ///< power of two: threads side by side for the experts
  Matrix<const float> probs;
  Matrix<const int32_t> ids;
  const float* lse;
  // To the unit's row where it is one chunk, else to the chunk's.
  Matrix<float> counts, prob_sums;
  float* partial_counts;
  float* partial_sums;
  double* partial_squares;  ///< null where there is one chunk in all
  double* z_sum;
};

__global__ void __launch_bounds__(kStatisticsThreads) router_chunks_kernel(StatisticsArguments a) {
  extern __shared__ __align__(16) int chosen[];  // [experts]
  __shared__ float sums[kStatisticsThreads];
  const int64_t chunk = blockIdx.x, unit = chunk / a.unit_chunks;
  const int64_t begin = unit * a.unit_tokens + (chunk - unit * a.unit_chunks) * a.chunk_tokens;
  const int64_t end = min(min(begin + a.chunk_tokens, (unit + 1) * a.unit_tokens), a.tokens);
  float* counts = a.unit_chunks == 1 ? a.counts[unit] : a.partial_counts + chunk * a.experts;
  float* prob_sums = a.unit_chunks == 1 ? a.prob_sums[unit] : a.partial_sums + chunk * a.experts;
  const int tokens = int(max(end - begin, int64_t(0)));

  for (int e = int(threadIdx.x); e < a.experts; e += kStatisticsThreads) chosen[e] = 0;
  __syncthreads();
  for (int pair = int(threadIdx.x); pair < tokens * a.top_k; pair += kStatisticsThreads) {
    const int t = pair / a.top_k;
    atomicAdd(&chosen[a.ids[begin + t][pair - t * a.top_k]], 1);  // integers: in any order the same
  }
  double squares = 0.0;
  for (int t = int(threadIdx.x); t < tokens; t += kStatisticsThreads) {
    const double lse = a.lse[begin + t];
    squares += lse * lse;
  }
  squares = reduce_block(squares, Sum{});
  if (threadIdx.x == 0) {
    if (a.partial_squares) a.partial_squares[chunk] = squares;
    else *a.z_sum += squares;
  }
  for (int e = int(threadIdx.x); e < a.experts; e += kStatisticsThreads) counts[e] = float(chosen[e]);

  // `width` experts at a time; the threads above each take every `slices`-th token.
  const int column = int(threadIdx.x) % a.width, slice = int(threadIdx.x) / a.width;
  const int slices = kStatisticsThreads / a.width;
  for (int first = 0; first < a.experts; first += a.width) {
    const int e = first + column;
    float sum = 0.0f;
    if (e < a.experts) {
#pragma unroll 4
      for (int t = slice; t < tokens; t += slices) sum += a.probs[begin + t][e];
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (slice == 0 && e < a.experts) {
      for (int s = 1; s < slices; ++s) sum += sums[s * a.width + column];
      prob_sums[e] = sum;
    }
    __syncthreads();
  }
}

/// Blocks 0 .. U*column_blocks-1 add the chunks of 32 experts of a unit: a warp every 32nd chunk, then the first one
/// the warps'. The last block adds the sums of lse^2.
__global__ void __launch_bounds__(1024)
    router_units_kernel(StatisticsArguments a, int64_t units, int64_t chunks, int column_blocks) {
  if (int64_t(blockIdx.x) == units * column_blocks) {
    double squares = 0.0;
    for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) squares += a.partial_squares[chunk];
    squares = reduce_block(squares, Sum{});
    if (threadIdx.x == 0) *a.z_sum += squares;
    return;
  }
  __shared__ double sums[32][kWarp];
  __shared__ int counts[32][kWarp];
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int64_t unit = blockIdx.x / unsigned(column_blocks);
  const int e = int(blockIdx.x % unsigned(column_blocks)) * kWarp + lane;
  double sum = 0.0;
  int count = 0;
  if (e < a.experts) {
#pragma unroll 4
    for (int64_t chunk = warp; chunk < a.unit_chunks; chunk += 32) {
      const int64_t at = (unit * a.unit_chunks + chunk) * a.experts + e;
      sum += double(a.partial_sums[at]);
      count += int(a.partial_counts[at]);
    }
  }
  sums[warp][lane] = sum;
  counts[warp][lane] = count;
  __syncthreads();
  if (warp > 0 || e >= a.experts) return;
  for (int i = 1; i < 32; ++i) sum += sums[i][lane], count += counts[i][lane];
  a.counts[unit][e] = float(count);
  a.prob_sums[unit][e] = float(sum);
}

// ---- backward ----

struct BackwardArguments {
  int64_t tokens, unit_tokens;
  int experts, top_k;
  bool softmax, normalize;
  float score_scale, z_scale;
  Matrix<const float> logits, probs;
  Matrix<const int32_t> ids;
  const float* lse;
  Matrix<const float> dgates, balance;
  Matrix<float> dlogits;
};

__global__ void __launch_bounds__(kRouterThreads) router_backward_kernel(BackwardArguments a) {
  extern __shared__ __align__(16) float shared[];
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int64_t token = int64_t(blockIdx.x) * (blockDim.x / kWarp) + warp;
  if (token >= a.tokens) return;  // a whole warp
  float* dscores = shared + warp * a.experts;
  const float* logits = a.logits[token];
  const float* probs = a.probs[token];
  const int32_t* ids = a.ids[token];
  const float* dgates = a.dgates[token];
  const float* balance = a.balance.data ? a.balance[token / a.unit_tokens] : nullptr;
  const auto score_of = [&](int e) { return a.softmax ? probs[e] : sigmoid(logits[e]); };

  // The balance loss's gradient by the scores; its projection on probs is subtracted below for the softmax.
  float inverse_sum = 1.0f, projection = 0.0f;
  if (balance && !a.softmax) {
    float sum = 0.0f;
    for (int e = lane; e < a.experts; e += kWarp) {
      sum += sigmoid(logits[e]);
      projection += balance[e] * probs[e];
    }
    inverse_sum = 1.0f / reduce_warp(sum, Sum{});
    projection = reduce_warp(projection, Sum{});
  }
  for (int e = lane; e < a.experts; e += kWarp) dscores[e] = balance ? (balance[e] - projection) * inverse_sum : 0.0f;

  float inverse_n = 1.0f, mean = 0.0f;
  if (a.normalize) {
    float chosen = 0.0f, along = 0.0f;
    for (int k = lane; k < a.top_k; k += kWarp) {
      const float score = score_of(ids[k]);
      chosen += score;
      along += dgates[k] * score;
    }
    inverse_n = 1.0f / (reduce_warp(chosen, Sum{}) + (a.softmax ? 0.0f : 1e-20f));
    mean = reduce_warp(along, Sum{}) * inverse_n;
  }
  __syncwarp();
  for (int k = lane; k < a.top_k; k += kWarp)  // each expert is chosen once
    dscores[ids[k]] += a.score_scale * (dgates[k] - mean) * inverse_n;
  __syncwarp();

  const float lse = a.lse[token], z = 2.0f * a.z_scale * lse;
  float* dlogits = a.dlogits[token];
  if (a.softmax) {
    float inner = 0.0f;
    for (int e = lane; e < a.experts; e += kWarp) inner += probs[e] * dscores[e];
    inner = reduce_warp(inner, Sum{});
    for (int e = lane; e < a.experts; e += kWarp) dlogits[e] = probs[e] * (dscores[e] - inner + z);
  } else {
    for (int e = lane; e < a.experts; e += kWarp) {
      const float s = sigmoid(logits[e]);
      dlogits[e] = s * (1.0f - s) * dscores[e] + z * expf(logits[e] - lse);
    }
  }
}

// ---- balance loss ----

__global__ void __launch_bounds__(kBalanceThreads)
    balance_loss_kernel(unsigned units, unsigned experts, Matrix<const float> counts, Matrix<const float> prob_sums,
                        const float* fixed_f, double inverse_tokens, double scale, double gradient_scale, double* loss,
                        Matrix<float> gradients) {
  double sum = 0.0;
#pragma unroll 4
  for (unsigned i = threadIdx.x; i < units * experts; i += kBalanceThreads) {
    const unsigned unit = i / experts, e = i - unit * experts;
    const double f = fixed_f ? double(fixed_f[e]) : double(counts[unit][e]) * inverse_tokens;
    sum += f * double(prob_sums[unit][e]) * inverse_tokens;
    gradients[unit][e] = float(gradient_scale * double(experts) * f * inverse_tokens);
  }
  sum = reduce_block(sum, Sum{});
  if (threadIdx.x == 0) *loss += scale * double(experts) * sum;
}

}  // namespace

void CudaOps::router_statistics(const RouterShape& shape, Tensor probs_TE, Tensor ids_TK, Tensor lse_T,
                                Tensor counts_UE, Tensor prob_sums_UE, Tensor z_sum) {
  const int64_t experts = probs_TE.columns(), units = counts_UE.rows();
  if (units == 0) return;
  expects(experts * 4 <= kRouterSharedBytes - 4096, "router statistics of {} experts", experts);
  const int64_t unit_tokens = std::max<int64_t>(std::min(shape.tokens_per_unit, probs_TE.rows()), 1);
  // Small chunks fill the device; larger ones where their sums would not fit.
  int64_t chunk_tokens = 64, unit_chunks = 1;
  for (;; chunk_tokens *= 2) {
    unit_chunks = ceil_div(unit_tokens, chunk_tokens);
    if (unit_chunks == 1 || units * unit_chunks * (2 * experts + 2) * 4 <= kMostPartialBytes) break;
  }
  const int64_t chunks = units * unit_chunks;
  scratch_.begin();
  const bool several = unit_chunks > 1;
  int width = 1;
  while (width < experts && width < kStatisticsThreads) width *= 2;
  const StatisticsArguments arguments{probs_TE.rows(),
                                      unit_tokens,
                                      unit_chunks,
                                      chunk_tokens,
                                      int(experts),
                                      int(shape.top_k),
                                      width,
                                      Matrix<const float>(probs_TE),
                                      Matrix<const int32_t>(ids_TK),
                                      lse_T.as<float>(),
                                      Matrix<float>(counts_UE),
                                      Matrix<float>(prob_sums_UE),
                                      several ? scratch_.take<float>(chunks * experts) : nullptr,
                                      several ? scratch_.take<float>(chunks * experts) : nullptr,
                                      chunks > 1 ? scratch_.take<double>(chunks) : nullptr,
                                      z_sum.as<double>()};
  launch(router_chunks_kernel, chunks, kStatisticsThreads, size_t(experts * 4), stream_, arguments);
  if (chunks == 1) return;
  const int64_t column_blocks = several ? ceil_div(experts, kWarp) : 0;
  launch(router_units_kernel, units * column_blocks + 1, 1024, 0, stream_, arguments, units, chunks, column_blocks);
}

void CudaOps::router_backward(const RouterShape& shape, Tensor logits_TE, Tensor probs_TE, Tensor, Tensor ids_TK,
                              Tensor lse_T, Tensor dgates_TK, Tensor balance_UE, float z_scale, Tensor dlogits_TE) {
  const int64_t experts = logits_TE.columns();
  const int64_t warps = std::min<int64_t>(kRouterThreads / kWarp, kRouterSharedBytes / (experts * 4));
  expects(warps > 0, "router of {} experts", experts);
  const BackwardArguments arguments{logits_TE.rows(),
                                    std::max<int64_t>(shape.tokens_per_unit, 1),
                                    int(experts),
                                    int(shape.top_k),
                                    shape.score == ScoreKind::softmax,
                                    shape.normalize_top_k,
                                    shape.score_scale,
                                    z_scale,
                                    Matrix<const float>(logits_TE),
                                    Matrix<const float>(probs_TE),
                                    Matrix<const int32_t>(ids_TK),
                                    lse_T.as<float>(),
                                    Matrix<const float>(dgates_TK),
                                    Matrix<const float>(balance_UE),
                                    Matrix<float>(dlogits_TE)};
  launch(router_backward_kernel, ceil_div(logits_TE.rows(), warps), int(warps) * kWarp, size_t(warps * experts * 4),
         stream_, arguments);
}

void CudaOps::balance_loss(Tensor counts_UE, Tensor prob_sums_UE, Tensor fixed_f_E, double tokens, double scale,
                           double gradient_scale, Tensor loss, Tensor gradient_UE) {
  const int64_t units = counts_UE.rows(), experts = counts_UE.columns();
  expects(units * experts < (int64_t(1) << 31), "balance loss of {} units", units);
  launch(balance_loss_kernel, units > 0 ? 1 : 0, kBalanceThreads, 0, stream_, units, experts,
         Matrix<const float>(counts_UE), Matrix<const float>(prob_sums_UE), fixed_f_E ? fixed_f_E.as<float>() : nullptr,
         1.0 / tokens, scale, gradient_scale, loss.as<double>(), Matrix<float>(gradient_UE));
}

}  // namespace optimus::cuda
