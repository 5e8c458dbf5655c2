// The index from rows to tokens and back, and the copies that follow it.
//
// A slot is a (token, k) pair, numbered s = t*K + k. It belongs to a group (a local expert, or a rank) or to none, and
// rows are the slots of groups in a stable counting sort:
//   row(s) = rows of all lower groups + slots of the same group before s
// Slots are cut into one range for each warp of the grid. Where a warp's rows of each group begin is a sum of counts
// over groups and warps; from there on a warp walks through its range alone, 32 slots a step. Counting uses integer
// atomics, whose sums do not depend on their order. Few slots are the work of one block, so that small models launch
// once; many take two launches, and each block of the second adds up what all blocks of the first have counted.
//
// What is written is the wave [first_row, first_row + R) of the rows. A warp's rows of a group follow those of the
// warps before it, so the entries of token lists before its range are, group by group, the rows of the wave between the
// group's beginning and the warp's.
//
// Gathering goes by tokens: one is read once and written to all of its rows, which with many rows is half the traffic.
#include <algorithm>
#include <bit>

#include "optimus/ops/cuda/kernels.cuh"

namespace optimus::cuda {
namespace {

constexpr int64_t kMostSlots = int64_t(1) << 30;  // numbers of slots and rows, and sums of two, fit into an int
constexpr int64_t kSlotsOfOneBlock = 8192;        // up to here a second launch costs more than it saves
constexpr int64_t kBlockSlots = 1024;             // of a block, where that makes no more blocks than
constexpr int64_t kMostBlocks = 264;              // each of which reads the counts of all
constexpr int64_t kSharedInts = 12000;            // just under 48 KiB
constexpr int64_t kMostGroups = kSharedInts / 3;  // with a single warp
constexpr int kOneBlockWarps = 32, kGridWarps = 16;
constexpr int kStepsAtOnce = 4;  // slots that a lane loads before it uses the first
constexpr int kNone = -1;

struct LocalExpert {
  const int32_t* ids;
  int64_t pitch;
  int first, groups;

  __device__ int operator()(int token, int k) const {
    const unsigned expert = unsigned(ids[token * pitch + k]) - unsigned(first);  // negative ids become huge
    return expert < unsigned(groups) ? int(expert) : kNone;
  }
};

/// The rank of the slot's expert, where no earlier slot of the token names the same rank.
struct FirstOfRank {
  const int32_t* ids;
  int64_t pitch;
  int each, groups;

  __device__ int operator()(int token, int k) const {
    const int32_t* experts = ids + token * pitch;
    const int rank = experts[k] / each;
    if (experts[k] < 0 || rank >= groups) return kNone;
    const unsigned first = unsigned(rank) * unsigned(each);
    bool sent = false;
    for (int j = 0; j < k; ++j) sent |= unsigned(experts[j]) - first < unsigned(each);
    return sent ? kNone : rank;
  }
};

struct Slots {
  int count, top_k, per_warp;
};
/// The rows that are written, and how a number of rows from the first one on becomes a number of the wave's.
struct Wave {
  int first, capacity;
  __device__ int clamp(int row) const { return min(max(row - first, 0), capacity); }
};
struct IndexPointers {
  int32_t *offsets, *token, *slot, *row_ptr, *row;  // slot is null where it is not wanted
};

/// visit(slot, token, k, group) for the slots of the calling warp, 32 in a step; for lanes past the end the group is
/// kNone and the slot not below slots.count. All lanes take part in every step.
template <typename GroupOf, typename Visit>
__device__ void walk(const GroupOf& group_of, const Slots& slots, Visit&& visit) {
  const int lane = int(threadIdx.x) % kWarp;
  const int warp = int((blockIdx.x * blockDim.x + threadIdx.x) / kWarp);
  const int begin = warp * slots.per_warp, end = min(begin + slots.per_warp, slots.count);
  for (int first = begin; first < end; first += kStepsAtOnce * kWarp) {
    int token[kStepsAtOnce], k[kStepsAtOnce], group[kStepsAtOnce];
#pragma unroll
    for (int i = 0; i < kStepsAtOnce; ++i) {
      const unsigned slot = unsigned(first + i * kWarp + lane), t = slot / unsigned(slots.top_k);
      token[i] = int(t);
      k[i] = int(slot - t * unsigned(slots.top_k));
      group[i] = int(slot) < end ? group_of(token[i], k[i]) : kNone;
    }
#pragma unroll
    for (int i = 0; i < kStepsAtOnce; ++i) {
      const int slot = first + i * kWarp + lane;
      visit(slot < end ? slot : slots.count, token[i], k[i], group[i]);
    }
  }
}

/// Slots of each group in each block.
template <typename GroupOf>
__global__ void __launch_bounds__(kGridWarps* kWarp) count_kernel(GroupOf group_of, Slots slots, int* counts_BG) {
  extern __shared__ int shared[];
  for (int group = int(threadIdx.x); group < group_of.groups; group += int(blockDim.x)) shared[group] = 0;
  __syncthreads();
  walk(group_of, slots, [&](int, int, int, int group) {
    if (group != kNone) atomicAdd(&shared[group], 1);
  });
  __syncthreads();
  int* counts = counts_BG + int64_t(blockIdx.x) * group_of.groups;
  for (int group = int(threadIdx.x); group < group_of.groups; group += int(blockDim.x)) counts[group] = shared[group];
}

/// all[g] += the sum of all blocks' counts, before[g] += that of the blocks before the calling one.
__device__ void add_counts(const int* counts_BG, int groups, int* all, int* before) {
  const int blocks = int(gridDim.x), parts = max(1, int(blockDim.x) / max(groups, 1));
  for (int i = int(threadIdx.x); i < parts * groups; i += int(blockDim.x)) {
    const int group = i % groups;
    int sum = 0, earlier = 0;
#pragma unroll 8
    for (int block = i / groups; block < blocks; block += parts) {
      const int count = counts_BG[int64_t(block) * groups + group];
      sum += count;
      earlier += block < int(blockIdx.x) ? count : 0;
    }
    atomicAdd(&all[group], sum);
    atomicAdd(&before[group], earlier);
  }
}

/// values[i] = sum of the values before i, by one warp; returns the sum of all.
__device__ int exclusive_scan_by_warp(int* values, int count) {
  const int lane = int(threadIdx.x) % kWarp;
  int total = 0;
  for (int first = 0; first < count; first += kWarp) {
    const int value = first + lane < count ? values[first + lane] : 0;
    const int inclusive = prefix_sum_warp(value);
    if (first + lane < count) values[first + lane] = total + inclusive - value;
    total += __shfl_sync(kAllLanes, inclusive, kWarp - 1);
  }
  return total;
}

/// Writes the index. `counts_BG` is not read by a single block. Shared memory: (2 + warps) * groups ints.
template <typename GroupOf>
__global__ void __launch_bounds__(kOneBlockWarps* kWarp)
    index_kernel(GroupOf group_of, Slots slots, Wave wave, const int* counts_BG, IndexPointers index) {
  extern __shared__ int shared[];
  __shared__ int total;
  const int groups = group_of.groups, warps = int(blockDim.x) / kWarp;
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  int* begins = shared;                // rows of a group; then where they begin
  int* before = shared + groups;       // of these, rows of earlier blocks
  int* cursors = shared + 2 * groups;  // rows of each warp of the block; then where its next one is
  int* mine = cursors + warp * groups;

  for (int i = int(threadIdx.x); i < (2 + warps) * groups; i += int(blockDim.x)) shared[i] = 0;
  __syncthreads();
  walk(group_of, slots, [&](int, int, int, int group) {
    if (group != kNone) atomicAdd(&mine[group], 1);
  });
  if (gridDim.x > 1) add_counts(counts_BG, groups, begins, before);
  __syncthreads();
  if (gridDim.x == 1) {
    for (int group = int(threadIdx.x); group < groups; group += int(blockDim.x)) {
      int sum = 0;
      for (int w = 0; w < warps; ++w) sum += cursors[w * groups + group];
      begins[group] = sum;
    }
    __syncthreads();
  }
  if (warp == 0) {
    const int sum = exclusive_scan_by_warp(begins, groups);
    if (lane == 0) total = sum;
  }
  __syncthreads();
  for (int group = int(threadIdx.x); group < groups; group += int(blockDim.x)) {
    int next = begins[group] + before[group];
    for (int w = 0; w < warps; ++w) {
      const int rows = cursors[w * groups + group];
      cursors[w * groups + group] = next;
      next += rows;
    }
    if (blockIdx.x == 0) index.offsets[group] = wave.clamp(begins[group]);
  }
  if (blockIdx.x + threadIdx.x == 0)
    index.offsets[groups] = index.row_ptr[slots.count / slots.top_k] = wave.clamp(total);
  __syncthreads();

  int entries = 0;
  for (int group = lane; group < groups; group += kWarp) entries += wave.clamp(mine[group]) - wave.clamp(begins[group]);
  entries = reduce_warp(entries, Sum{});
  __syncwarp();  // the cursors move from here on
  walk(group_of, slots, [&](int slot, int token, int k, int group) {
    const unsigned lower = (1u << lane) - 1, same = __match_any_sync(kAllLanes, group);
    const int next = group != kNone ? mine[group] : 0, rank = __popc(same & lower);
    __syncwarp();
    if (group != kNone && rank == 0) mine[group] = next + __popc(same);
    __syncwarp();
    const int row = next + rank - wave.first;
    const bool written = group != kNone && row >= 0 && row < wave.capacity;
    const unsigned all_written = __ballot_sync(kAllLanes, written);
    const int entry = entries + __popc(all_written & lower);
    if (slot < slots.count && k == 0) index.row_ptr[token] = entry;
    if (written) {
      index.token[row] = token;
      if (index.slot) index.slot[row] = slot;
      index.row[entry] = row;
    }
    entries += __popc(all_written);
  });
}

template <typename GroupOf>
void make_index(cudaStream_t stream, Scratch& scratch, const GroupOf& group_of, int64_t tokens, int64_t top_k,
                int64_t first_row, const RouteIndex& index, int32_t* slot) {
  const int64_t count = tokens * top_k, groups = group_of.groups;
  expects(count <= kMostSlots && groups <= kMostGroups, "an index of {} slots of {} groups, at most {} of {}", count,
          groups, kMostSlots, kMostGroups);
  const bool one_block = count <= kSlotsOfOneBlock;
  const int64_t wanted_warps = one_block ? std::clamp<int64_t>(ceil_div(count, kWarp), 1, kOneBlockWarps) : kGridWarps;
  const int64_t warps = std::clamp<int64_t>(kSharedInts / std::max<int64_t>(groups, 1) - 2, 1, wanted_warps);
  const int64_t most_blocks = one_block ? 1 : std::min(ceil_div(count, kBlockSlots), kMostBlocks);
  const int64_t per_warp = std::max<int64_t>(ceil_div(ceil_div(count, most_blocks * warps), kWarp), 1) * kWarp;
  const int64_t blocks = std::max<int64_t>(ceil_div(count, per_warp * warps), 1);

  const Slots slots{int(count), int(std::max<int64_t>(top_k, 1)), int(per_warp)};
  const Wave wave{int(std::min(first_row, kMostSlots)), int(std::min(index.token_R.elements(), kMostSlots))};
  const IndexPointers pointers{index.offsets_L1.as<int32_t>(), index.token_R.as<int32_t>(), slot,
                               index.row_ptr_T1.as<int32_t>(), index.row_R.as<int32_t>()};
  int* counts_BG = nullptr;
  if (blocks > 1) {
    scratch.begin();
    counts_BG = scratch.take<int>(blocks * groups);
    launch(count_kernel<GroupOf>, blocks, int(warps) * kWarp, size_t(groups) * sizeof(int), stream, group_of, slots,
           counts_BG);
  }
  launch(index_kernel<GroupOf>, blocks, int(warps) * kWarp, size_t((2 + warps) * groups) * sizeof(int), stream,
         group_of, slots, wave, counts_BG, pointers);
}

// ---- copies ----

constexpr int kCopyThreads = 256;
constexpr int kCopyBlocks = 4;  // on a multiprocessor; room for the registers of all loads in flight
constexpr int kGatherLoads = 4, kGatherRows = 4, kCombineRows = 8;  // loads of a thread before it uses the first

/// How threads share a matrix whose rows are `units` accesses wide: 2^log2_lanes neighbours, a warp or where rows are
/// short a part of one, take a piece of a token, `depth` accesses each.
struct Pieces {
  Pieces(int64_t tokens, int64_t units, int64_t depth)
      : tokens(tokens),
        units(units),
        log2_lanes(std::countr_zero(std::bit_ceil(uint64_t(std::clamp<int64_t>(units, 1, kWarp))))),
        per_token(unsigned(ceil_div(units, depth << log2_lanes))) {
    expects(tokens * per_token < (int64_t(1) << 31), "{} tokens of {} pieces", tokens, per_token);
  }
  int64_t blocks() const { return ceil_div((tokens * per_token) << log2_lanes, kCopyThreads); }

  /// The calling thread's token, >= tokens for threads without one, and its first access in it.
  __device__ void find(int64_t depth, int64_t& token, int64_t& unit) const {
    const int64_t thread = int64_t(blockIdx.x) * kCopyThreads + threadIdx.x;
    const unsigned piece = unsigned(thread >> log2_lanes), t = piece / per_token;
    token = t;
    unit = ((int64_t(piece - t * per_token) * depth) << log2_lanes) + (thread & ((1 << log2_lanes) - 1));
  }

  int64_t tokens, units;
  int log2_lanes;
  unsigned per_token;
};

/// Unit is what one access moves; elements are not looked at.
template <typename Unit>
__global__ void __launch_bounds__(kCopyThreads, kCopyBlocks)
    gather_kernel(Matrix<const Unit> x, const int32_t* __restrict__ row_ptr, const int32_t* __restrict__ row,
                  Matrix<Unit> rows, Pieces pieces) {
  int64_t token, first;
  pieces.find(kGatherLoads, token, first);
  if (token >= pieces.tokens) return;
  const int begin = row_ptr[token], end = row_ptr[token + 1];
  if (begin == end) return;
  Unit values[kGatherLoads] = {};
#pragma unroll
  for (int i = 0; i < kGatherLoads; ++i) {
    const int64_t unit = first + (i << pieces.log2_lanes);
    if (unit < pieces.units) values[i] = x[token][unit];
  }
  for (int entry = begin; entry < end; entry += kGatherRows) {
    int to[kGatherRows];
#pragma unroll
    for (int j = 0; j < kGatherRows; ++j) to[j] = row[min(entry + j, end - 1)];
#pragma unroll
    for (int j = 0; j < kGatherRows; ++j) {
      if (entry + j >= end) break;
#pragma unroll
      for (int i = 0; i < kGatherLoads; ++i) {
        const int64_t unit = first + (i << pieces.log2_lanes);
        if (unit < pieces.units) rows[to[j]][unit] = values[i];
      }
    }
  }
}

/// sum += the given rows, one after the other; all are loaded first.
template <int kRows, typename T, int N>
__device__ void add_rows(const int32_t* __restrict__ row, const T* __restrict__ data, int64_t pitch, float (&sum)[N]) {
  int from[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) from[i] = row[i];
  Vector<T, N> parts[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) parts[i] = load_vector<T, N>(data + from[i] * pitch);
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += to_float(parts[i][j]);
}

/// A thread has N columns of a token. With `in_place`, addend is y.
template <typename T, int N>
__global__ void __launch_bounds__(kCopyThreads, kCopyBlocks)
    combine_kernel(Matrix<const T> rows, const int32_t* __restrict__ row_ptr, const int32_t* __restrict__ row,
                   Matrix<const T> addend, bool in_place, Matrix<T> y, Pieces pieces) {
  int64_t token, unit;
  pieces.find(1, token, unit);
  if (token >= pieces.tokens || unit >= pieces.units) return;
  int entry = row_ptr[token];
  const int end = row_ptr[token + 1];
  if (in_place && entry == end) return;  // most tokens of every wave but the first
  const T* data = rows.data + unit * N;
  float sum[N] = {};
  for (; entry + kCombineRows <= end; entry += kCombineRows)
    add_rows<kCombineRows, T, N>(row + entry, data, rows.pitch, sum);
  const int rest = end - entry;
  if (rest & 4) add_rows<4, T, N>(row + entry, data, rows.pitch, sum), entry += 4;
  if (rest & 2) add_rows<2, T, N>(row + entry, data, rows.pitch, sum), entry += 2;
  if (rest & 1) add_rows<1, T, N>(row + entry, data, rows.pitch, sum);
  if (addend.data) {
    const Vector<T, N> values = load_vector<T, N>(addend[token] + unit * N);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += to_float(values[j]);
  }
  Vector<T, N> result;
#pragma unroll
  for (int j = 0; j < N; ++j) result[j] = from_float<T>(sum[j]);
  store_vector(y[token] + unit * N, result);
}

}  // namespace

void CudaOps::route(Tensor ids_TK, int64_t first_expert, int64_t first_row, const RouteIndex& index) {
  expects(first_row >= 0, "route from row {}", first_row);
  const LocalExpert group_of{ids_TK.as<int32_t>(), ids_TK.pitch, int(first_expert),
                             int(index.offsets_L1.elements() - 1)};
  make_index(stream_, scratch_, group_of, ids_TK.rows(), ids_TK.columns(), first_row, index,
             index.slot_R.as<int32_t>());
}

void CudaOps::route_to_ranks(Tensor ids_TK, int64_t experts_per_rank, const RouteIndex& index) {
  const int64_t tokens = ids_TK.rows(), top_k = ids_TK.columns(), ranks = index.offsets_L1.elements() - 1;
  expects(index.token_R.elements() >= tokens * std::min(top_k, ranks),
          "route to {} ranks: {} rows are too few for {} tokens of {} experts", ranks, index.token_R.elements(), tokens,
          top_k);
  const FirstOfRank group_of{ids_TK.as<int32_t>(), ids_TK.pitch, int(experts_per_rank), int(ranks)};
  make_index(stream_, scratch_, group_of, tokens, top_k, 0, index, nullptr);
}

void CudaOps::gather_rows(Tensor x_TD, const RouteIndex& index, Tensor rows_RD) {
  const int64_t size = size_of(x_TD.dtype), tokens = index.row_ptr_T1.elements() - 1;
  expects(x_TD.dtype == rows_RD.dtype && x_TD.columns() == rows_RD.columns() && (size == 4 || size == 2),
          "gather of {} {} into {} {}", name_of(x_TD.dtype), x_TD.shape, name_of(rows_RD.dtype), rows_RD.shape);
  const auto gather_by = [&]<typename Unit>(Unit) {
    const Pieces pieces(tokens, x_TD.columns() * size / int64_t(sizeof(Unit)), kGatherLoads);
    launch(gather_kernel<Unit>, pieces.blocks(), kCopyThreads, 0, stream_, Matrix<const Unit>(x_TD),
           index.row_ptr_T1.as<int32_t>(), index.row_R.as<int32_t>(), Matrix<Unit>(rows_RD), pieces);
  };
  if (whole_vectors(x_TD) && whole_vectors(rows_RD)) return gather_by(uint4{});
  return size == 4 ? gather_by(uint32_t{}) : gather_by(uint16_t{});
}

void CudaOps::combine_rows(Tensor rows_RD, const RouteIndex& index, Tensor addend_TD, Tensor y_TD) {
  const bool vectors = whole_vectors(rows_RD) && whole_vectors(y_TD) && (!addend_TD || whole_vectors(addend_TD));
  const auto combine_by = [&]<typename T, int N>() {
    const Pieces pieces(y_TD.rows(), y_TD.columns() / N, 1);
    launch(combine_kernel<T, N>, pieces.blocks(), kCopyThreads, 0, stream_, Matrix<const T>(rows_RD),
           index.row_ptr_T1.as<int32_t>(), index.row_R.as<int32_t>(), Matrix<const T>(addend_TD),
           addend_TD.same_view(y_TD), Matrix<T>(y_TD), pieces);
  };
  with_real(y_TD.dtype, [&]<typename T>(T) {
    vectors ? combine_by.template operator()<T, kVectorWidth<T>>() : combine_by.template operator()<T, 1>();
  });
}

}  // namespace optimus::cuda
