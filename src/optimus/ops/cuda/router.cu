// The router's scores and choice; formulas in router.cuh.
//
// A token belongs to a warp; expert e to lane e % 32, in registers up to 512 experts, else in shared memory. The choice
// takes the best of the warp top_k times.
#include <algorithm>

#include "optimus/ops/cuda/router.cuh"

namespace optimus::cuda {
namespace {

/// An integer in the order of the floats; equal floats get equal ones, NaN counts as -inf, and none is 0.
__device__ unsigned ordered(float key) {
  key = isnan(key) ? -INFINITY : key + 0.0f;  // -0 becomes 0
  const unsigned bits = __float_as_uint(key);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
constexpr unsigned kLowest = 0x007FFFFFu;  // ordered(-inf)
constexpr unsigned kTaken = 0;

/// The values of a lane's experts lane + 32 i: kEach registers, or shared memory where kEach is 0.
template <typename T, int kEach>
struct LaneValues {
  T values[kEach];
  __device__ LaneValues(void*, int) {}
  __device__ T& operator[](int i) { return values[i]; }
};
template <typename T>
struct LaneValues<T, 0> {
  T* values;
  __device__ LaneValues(void* shared, int lane) : values(static_cast<T*>(shared) + lane) {}
  __device__ T& operator[](int i) { return values[i * kWarp]; }
};

/// The largest key of the warp and the lowest id among those that have it; id is unique to a lane.
struct Best {
  unsigned key;
  int id;
};
__device__ Best best_of_warp(unsigned key, int id) {
  const unsigned best = __reduce_max_sync(kAllLanes, key);
  return {best, __reduce_min_sync(kAllLanes, key == best ? id : INT32_MAX)};
}

struct RouterArguments {
  int64_t tokens;
  int experts, each, top_k, groups, top_groups;
  bool softmax, normalize;
  float score_scale;
  Matrix<const float> logits;
  const float* bias;
  Matrix<float> probs, gates;
  Matrix<int32_t> ids;
  float* lse;
};

/// Experts outside of the best groups get the lowest key. `group_scores`: [groups] of the warp. A group scores the sum
/// of its two best selection scores.
template <int kEach>
__device__ void exclude_groups(const RouterArguments& a, int each, int lane, float* group_scores,
                               LaneValues<float, kEach>& selection, LaneValues<unsigned, kEach>& keys) {
  const int size = a.experts / a.groups;
  for (int group = 0; group < a.groups; ++group) {
    float best = -INFINITY, second = -INFINITY;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int e = lane + i * kWarp;
      if (e < group * size || e >= (group + 1) * size) continue;
      const float score = selection[i];
      if (score > best) second = best, best = score;
      else if (score > second) second = score;
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, best, offset);
      const float other_second = __shfl_xor_sync(kAllLanes, second, offset);
      second = fmaxf(fminf(best, other), fmaxf(second, other_second));
      best = fmaxf(best, other);
    }
    if (lane == 0) group_scores[group] = size > 1 ? best + second : best;
  }
  __syncwarp();
  // The chosen groups are those not after the last of them, in the order of descending scores and ascending numbers.
  Best last{UINT32_MAX, -1};
  for (int k = 0; k < a.top_groups; ++k) {
    Best next{kTaken, INT32_MAX};
    for (int group = lane; group < a.groups; group += kWarp) {
      const unsigned key = ordered(group_scores[group]);
      if ((key < last.key || (key == last.key && group > last.id)) && key > next.key) next = {key, group};
    }
    last = best_of_warp(next.key, next.id);
  }
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int e = lane + i * kWarp, group = e / size;
    if (e >= a.experts) continue;
    const unsigned key = ordered(group_scores[group]);
    if (key < last.key || (key == last.key && group > last.id)) keys[i] = kLowest;
  }
}

/// Shared memory, of each warp: group scores where there are groups, then what LaneValues want.
template <int kEach>
__global__ void __launch_bounds__(kRouterThreads) router_kernel(RouterArguments a, int shared_of_warp) {
  extern __shared__ __align__(16) float shared[];
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int64_t token = int64_t(blockIdx.x) * (blockDim.x / kWarp) + warp;
  if (token >= a.tokens) return;  // a whole warp
  const int each = kEach > 0 ? kEach : a.each;
  float* group_scores = shared + warp * shared_of_warp;
  float* rest = group_scores + (a.groups > 1 ? a.groups : 0);
  LaneValues<float, kEach> scores(rest, lane), selection(rest + each * kWarp, lane);
  LaneValues<unsigned, kEach> keys(rest + 2 * each * kWarp, lane);

  const float* logits = a.logits[token];
  float maximum = -INFINITY;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int e = lane + i * kWarp;
    scores[i] = e < a.experts ? logits[e] : -INFINITY;
    maximum = fmaxf(maximum, scores[i]);
  }
  maximum = reduce_warp(maximum, Max{});
  float total = 0.0f, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const bool there = lane + i * kWarp < a.experts;
    const float exponential = there ? expf(scores[i] - maximum) : 0.0f;
    total += exponential;
    scores[i] = a.softmax ? exponential : there ? sigmoid(scores[i]) : 0.0f;
    sum += scores[i];
  }
  total = reduce_warp(total, Sum{});
  sum = reduce_warp(sum, Sum{});
  if (lane == 0) a.lse[token] = maximum + logf(total);

  float* probs = a.probs[token];
  const float inverse = 1.0f / sum;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int e = lane + i * kWarp;
    keys[i] = kTaken;
    selection[i] = 0.0f;
    if (e >= a.experts) continue;
    const float prob = scores[i] * inverse;
    probs[e] = prob;
    if (a.softmax) scores[i] = prob;
    selection[i] = a.bias ? scores[i] + a.bias[e] : scores[i];
    keys[i] = ordered(selection[i]);
  }
  if (a.groups > 1) exclude_groups<kEach>(a, each, lane, group_scores, selection, keys);

  float* gates = a.gates[token];
  int32_t* ids = a.ids[token];
  float chosen_sum = a.softmax ? 0.0f : 1e-20f, my_score = 0.0f;
  int my_id = 0;
  for (int k = 0; k < a.top_k; ++k) {
    unsigned key = kTaken;
    int id = INT32_MAX;
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (keys[i] > key) key = keys[i], id = lane + i * kWarp, score = scores[i];
    }
    const Best best = best_of_warp(key, id);
    score = __shfl_sync(kAllLanes, score, best.id % kWarp);
    chosen_sum += score;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (lane + i * kWarp == best.id) keys[i] = kTaken;
    }
    if (lane == k % kWarp) my_id = best.id, my_score = score;
    if (a.top_k > kWarp && lane == k % kWarp) ids[k] = best.id, gates[k] = score;
  }
  const float factor = a.score_scale / (a.normalize ? chosen_sum : 1.0f);
  if (a.top_k > kWarp) {
    for (int k = lane; k < a.top_k; k += kWarp) gates[k] *= factor;  // the lane's own
  } else if (lane < a.top_k) {
    ids[lane] = my_id;
    gates[lane] = factor * my_score;
  }
}

}  // namespace

void CudaOps::router(const RouterShape& shape, Tensor logits_TE, Tensor bias_E, Tensor probs_TE, Tensor gates_TK,
                     Tensor ids_TK, Tensor lse_T) {
  const int64_t experts = logits_TE.columns(), each = ceil_div(experts, kWarp);
  expects(experts % shape.groups == 0 && shape.top_k <= experts / shape.groups * shape.top_groups &&
              shape.top_groups <= shape.groups,
          "router: top {} of {} experts in the best {} of {} groups", shape.top_k, experts, shape.top_groups,
          shape.groups);
  const RouterArguments arguments{logits_TE.rows(),
                                  int(experts),
                                  int(each),
                                  int(shape.top_k),
                                  int(shape.groups),
                                  int(shape.top_groups),
                                  shape.score == ScoreKind::softmax,
                                  shape.normalize_top_k,
                                  shape.score_scale,
                                  Matrix<const float>(logits_TE),
                                  bias_E ? bias_E.as<float>() : nullptr,
                                  Matrix<float>(probs_TE),
                                  Matrix<float>(gates_TK),
                                  Matrix<int32_t>(ids_TK),
                                  lse_T.as<float>()};
  const auto kernel = each <= 1    ? router_kernel<1>
                      : each <= 2  ? router_kernel<2>
                      : each <= 4  ? router_kernel<4>
                      : each <= 8  ? router_kernel<8>
                      : each <= 16 ? router_kernel<16>
                                   : router_kernel<0>;
  const int64_t shared = (shape.groups > 1 ? shape.groups : 0) + (each > 16 ? 3 * each * kWarp : 0);  // a warp's
  const int64_t warps =
      std::min<int64_t>(kRouterThreads / kWarp, shared > 0 ? kRouterSharedBytes / 4 / shared : kRouterThreads);
  expects(warps > 0, "router of {} experts", experts);
  launch(kernel, ceil_div(logits_TE.rows(), warps), int(warps) * kWarp, size_t(warps * shared * 4), stream_, arguments,
         int(shared));
}

}  // namespace optimus::cuda
