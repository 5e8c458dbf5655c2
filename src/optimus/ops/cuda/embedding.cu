// The embedding's rows, and the sum of their gradients by token.
//
// The gradient takes two kernels. The first sorts the positions by token, keeping their order: a block owns kOwned rows
// of the vocabulary, looks at all ids and ranks those of its rows, so blocks need nothing of each other. The second
// writes every row of dw that changes once: the sum of its positions in order, or zeros where dw is overwritten; where
// it is added to, only tokens that occur are visited. A row of more than `chunk` positions is shared:
// each chunk of the sorted positions is added by a block of its own, and the block that ends last joins the chunks' sums
// in order; which one that is makes no difference.
#include "optimus/ops/cuda/kernels.cuh"

namespace optimus::cuda {
namespace {

constexpr int kThreads = 256;

// ---- forward ----

constexpr int kUnits = 4;  ///< of N elements, of a thread

template <typename Word, int N>
__global__ void __launch_bounds__(kThreads, 4)
    embedding_kernel(const int32_t* ids, const Word* w, int64_t w_pitch, Word* y, int64_t y_pitch, int64_t units_each,
                     int64_t count) {
  const int64_t first = int64_t(blockIdx.x) * (kThreads * kUnits) + threadIdx.x;
  Vector<Word, N> values[kUnits];
  Word* targets[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int64_t unit = first + k * kThreads;
    if (unit >= count) break;
    const int64_t t = unit / units_each, column = (unit - t * units_each) * N;
    values[k] = load_vector<Word, N>(w + int64_t(ids[t]) * w_pitch + column);
    targets[k] = y + t * y_pitch + column;
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k)
    if (first + k * kThreads < count) store_vector<Word, N>(targets[k], values[k]);
}

// ---- positions sorted by token ----

constexpr int kSortThreads = 1024;
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kOwned = 256;  ///< rows of the vocabulary that a block owns
constexpr int kAhead = 8;    ///< ids that a thread has on their way at once

/// A position in the order of tokens: which, its token, and where the token's positions begin and end in that order.
struct alignas(16) Entry {
  int32_t position, row, begin, end;
};

/// sorted = the positions by token, those of a token ascending; entries past them begin at -1. offsets[v] = number of
/// positions with a token below v, offsets[vocab] = all. Also clears the tickets of the kernel that follows.
__global__ void __launch_bounds__(kSortThreads)
    sort_positions_kernel(const int32_t* ids, int tokens, int vocab, int padding_token, int32_t* offsets, Entry* sorted,
                          int32_t* tickets, int ticket_count) {
  __shared__ int32_t places[kSortWarps][kOwned];  // positions of a warp and row: their number, then where the next goes
  __shared__ int32_t begins[kOwned + 1];          // of the rows
  __shared__ int32_t warp_totals[kOwned / kWarp];
  const int thread = int(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int first_row = int(blockIdx.x) * kOwned, rows = min(vocab - first_row, kOwned);
  for (int i = int(blockIdx.x) * kSortThreads + thread; i < ticket_count; i += int(gridDim.x) * kSortThreads)
    tickets[i] = 0;
  for (int i = thread; i < kSortWarps * kOwned; i += kSortThreads) places[i / kOwned][i % kOwned] = 0;
  __syncthreads();

  // Each warp has a run of the positions, a multiple of its width.
  const int run = (tokens + kSortThreads - 1) / kSortThreads * kWarp;
  const int begin = warp * run, end = min(begin + run, tokens);
  int32_t below = 0;
  const auto key_of = [&](int t) {  // the row among the block's, or -1
    if (t >= end) return -1;
    const int id = ids[t];
    if (id == padding_token || id < 0) return -1;
    below += id < first_row;
    return id >= first_row && id - first_row < rows ? id - first_row : -1;
  };
  const unsigned lanes_before = (1u << lane) - 1;
  // visit(position, row, the warp's lanes with that row) of each 32 positions that the block's rows occur in.
  const auto each_of_run = [&](const auto& visit) {
    for (int t = begin + lane; t - lane < end; t += kAhead * kWarp) {
      int keys[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) keys[i] = key_of(t + i * kWarp);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (!__any_sync(kAllLanes, keys[i] >= 0)) continue;
        visit(t + i * kWarp, keys[i], __match_any_sync(kAllLanes, keys[i]));
        __syncwarp();
      }
    }
  };
  each_of_run([&](int32_t, int key, unsigned same) {
    if (key >= 0 && (same & lanes_before) == 0) places[warp][key] += __popc(same);
  });
  const int32_t base = reduce_block(below, Sum{});  // also a barrier

  int32_t past = 0;  // of a row, from the first of its warp on
  if (thread < kOwned) {
    int32_t total = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int32_t count = places[w][thread];
      places[w][thread] = total;
      total += count;
    }
    past = prefix_sum_warp(total);
    if (lane == kWarp - 1) warp_totals[warp] = past;
  }
  __syncthreads();
  if (thread < kOwned) {
    past += base;
    for (int w = 0; w < warp; ++w) past += warp_totals[w];
    begins[thread + 1] = past;
    if (thread == 0) begins[0] = base;
  }
  __syncthreads();
  for (int i = thread; i < kSortWarps * kOwned; i += kSortThreads) places[i / kOwned][i % kOwned] += begins[i % kOwned];
  if (thread < rows) offsets[first_row + thread] = begins[thread];
  if (first_row + rows == vocab) {
    if (thread == 0) offsets[vocab] = begins[kOwned];
    for (int i = begins[kOwned] + thread; i < tokens; i += kSortThreads) sorted[i] = {-1, -1, -1, -1};
  }
  __syncthreads();

  each_of_run([&](int32_t position, int key, unsigned same) {
    const int32_t place = key >= 0 ? places[warp][key] : 0;
    __syncwarp();
    if (key < 0) return;
    sorted[place + __popc(same & lanes_before)] = {position, first_row + key, begins[key], begins[key + 1]};
    if ((same & lanes_before) == 0) places[warp][key] = place + __popc(same);
  });
}

// ---- sums ----

template <typename T, int N>
__device__ void add_elements(const T* from, float (&sum)[N]) {
  constexpr int kWidth = N < kVectorWidth<T> ? N : kVectorWidth<T>;
#pragma unroll
  for (int i = 0; i < N; i += kWidth) {
    const Vector<T, kWidth> values = load_vector<T, kWidth>(from + i);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sum[i + k] += to_float(values[k]);
  }
}
template <typename T, int N>
__device__ void store_elements(T* to, const float (&sum)[N]) {
  constexpr int kWidth = N < kVectorWidth<T> ? N : kVectorWidth<T>;
#pragma unroll
  for (int i = 0; i < N; i += kWidth) {
    Vector<T, kWidth> values;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) values[k] = from_float<T>(sum[i + k]);
    store_vector<T, kWidth>(to + i, values);
  }
}

/// sum += the rows of dy at the sorted positions [begin, end), N columns from `column` on.
template <typename T, int N>
__device__ void add_positions(const T* dy, int64_t pitch, const Entry* sorted, int32_t begin, int32_t end,
                              int64_t column, float (&sum)[N]) {
#pragma unroll 4
  for (int32_t p = begin; p < end; ++p) add_elements<T, N>(dy + int64_t(sorted[p].position) * pitch + column, sum);
}

struct Positions {
  const int32_t* offsets;
  const Entry* sorted;
  int32_t* tickets;  ///< of each chunk in which a shared row begins: chunks of that row that are summed
  float* partials;   ///< [chunks][2][columns]: of the row that began before the chunk, of one that begins in it
  int64_t tokens, vocab;
  int32_t chunk, chunks;
};

/// The first `chunks` blocks look after rows of more than `chunk` positions, the others after units of N columns of the
/// remaining rows: of all where dw is overwritten; where it is added to, of each sorted position that is a token's first.
template <typename T, typename G, int N>
__global__ void __launch_bounds__(kThreads, 5)
    embedding_backward_kernel(Positions at, const T* dy, int64_t dy_pitch, G* dw, int64_t dw_pitch, int64_t columns,
                              bool accumulate) {
  const int64_t units_each = columns / N;
  if (int64_t(blockIdx.x) >= at.chunks) {
    const int64_t unit = (int64_t(blockIdx.x) - at.chunks) * kThreads + threadIdx.x;
    const int64_t item = unit / units_each, column = (unit - item * units_each) * N;
    if (item >= (accumulate ? at.tokens : at.vocab)) return;
    float sum[N] = {};
    if (accumulate) {
      const Entry first = at.sorted[item];
      if (first.begin != item || first.end - first.begin > at.chunk) return;
      G* to = dw + first.row * dw_pitch + column;
      add_elements<G, N>(to, sum);
      add_elements<T, N>(dy + first.position * dy_pitch + column, sum);
      add_positions<T, N>(dy, dy_pitch, at.sorted, first.begin + 1, first.end, column, sum);
      store_elements<G, N>(to, sum);
    } else {
      const int32_t begin = at.offsets[item], end = at.offsets[item + 1];
      if (end - begin > at.chunk) return;
      add_positions<T, N>(dy, dy_pitch, at.sorted, begin, end, column, sum);
      store_elements<G, N>(dw + item * dw_pitch + column, sum);
    }
    return;
  }

  __shared__ bool last;
  const int32_t first = int32_t(blockIdx.x) * at.chunk, all = at.offsets[at.vocab];
  const int32_t past = all - first < at.chunk ? all : first + at.chunk;
  if (first >= past) return;
  const Entry ends[2] = {at.sorted[first], at.sorted[past - 1]};
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    const Entry entry = ends[which];
    if (entry.end - entry.begin <= at.chunk || (which == 1 && entry.row == ends[0].row)) continue;
    const int32_t begin = entry.begin > first ? entry.begin : first, end = entry.end < past ? entry.end : past;
    float* partial = at.partials + int64_t(blockIdx.x * 2 + (entry.begin >= first)) * columns;
    for (int64_t column = threadIdx.x * N; column < columns; column += kThreads * N) {
      float sum[N] = {};
      add_positions<T, N>(dy, dy_pitch, at.sorted, begin, end, column, sum);
      store_elements<float, N>(partial + column, sum);
    }

    // Every thread's sums are visible to all before its block is counted.
    const int32_t first_chunk = entry.begin / at.chunk, last_chunk = (entry.end - 1) / at.chunk;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&at.tickets[first_chunk], 1) == last_chunk - first_chunk;
    __syncthreads();
    if (!last) continue;
    __threadfence();
    for (int64_t column = threadIdx.x * N; column < columns; column += kThreads * N) {
      float sum[N] = {};
      G* to = dw + entry.row * dw_pitch + column;
      if (accumulate) add_elements<G, N>(to, sum);
#pragma unroll 2
      for (int32_t chunk = first_chunk; chunk <= last_chunk; ++chunk)
        add_elements<float, N>(at.partials + int64_t(chunk * 2 + (chunk == first_chunk)) * columns + column, sum);
      store_elements<G, N>(to, sum);
    }
  }
}

}  // namespace

void CudaOps::embedding(Tensor ids_T, Tensor w_VD, Tensor y_TD) {
  expects(w_VD.dtype == y_TD.dtype, "embedding of {} to {}", name_of(w_VD.dtype), name_of(y_TD.dtype));
  const int64_t tokens = ids_T.elements(), columns = w_VD.columns();
  const auto run = [&]<typename Word, int N>(Word, std::integral_constant<int, N>) {
    const int64_t units_each = columns / N, count = tokens * units_each;
    launch(embedding_kernel<Word, N>, ceil_div(count, kThreads * kUnits), kThreads, 0, stream_, ids_T.as<int32_t>(),
           pointer<const Word>(w_VD), w_VD.pitch, pointer<Word>(y_TD), y_TD.pitch, units_each, count);
  };
  const bool vectors = whole_vectors(w_VD) && whole_vectors(y_TD);
  with_real(w_VD.dtype, [&]<typename T>(T) {
    using Word = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    if (vectors) run(Word{}, std::integral_constant<int, kVectorWidth<Word>>{});
    else run(Word{}, std::integral_constant<int, 1>{});
  });
}

void CudaOps::embedding_backward(Tensor ids_T, Tensor dy_TD, Tensor dw_VD, int64_t padding_token, Write write) {
  constexpr int64_t kWidth = 8, kPartialBytes = int64_t(24) << 20;
  const int64_t tokens = ids_T.elements(), vocab = dw_VD.rows(), columns = dw_VD.columns();
  if (vocab == 0 || (tokens == 0 && write == Write::accumulate)) return;
  int32_t chunk = 64;
  while (ceil_div(tokens, chunk) * 2 * columns * int64_t(sizeof(float)) > kPartialBytes) chunk *= 2;
  const int32_t chunks = tokens > chunk ? int32_t(ceil_div(tokens, chunk)) : 0;
  expects(vocab * 4 + tokens * int64_t(sizeof(Entry)) + kPartialBytes + (int64_t(1) << 20) <= kScratchBytes,
          "embedding_backward of {} tokens and {} rows", tokens, vocab);

  scratch_.begin();
  int32_t* offsets = scratch_.take<int32_t>(vocab + 1);
  Entry* sorted = scratch_.take<Entry>(tokens);
  int32_t* tickets = scratch_.take<int32_t>(chunks);
  const Positions at{offsets, sorted, tickets, scratch_.take<float>(int64_t(chunks) * 2 * columns),
                     tokens,  vocab,  chunk,   chunks};
  launch(sort_positions_kernel, ceil_div(vocab, kOwned), kSortThreads, 0, stream_, ids_T.as<int32_t>(), int(tokens),
         int(vocab), int(padding_token), offsets, sorted, tickets, chunks);

  const auto run = [&]<typename T, typename G, int N>(T, G, std::integral_constant<int, N>) {
    const bool accumulate = write == Write::accumulate;
    const int64_t items = accumulate ? tokens : vocab;
    launch(embedding_backward_kernel<T, G, N>, chunks + ceil_div(items * (columns / N), kThreads), kThreads, 0, stream_,
           at, pointer<const T>(dy_TD), dy_TD.pitch, pointer<G>(dw_VD), dw_VD.pitch, columns, accumulate);
  };
  const bool vectors = columns % kWidth == 0 && whole_vectors(dy_TD) && whole_vectors(dw_VD);
  with_real(dy_TD.dtype, [&]<typename T>(T t) {
    with_real(dw_VD.dtype, [&]<typename G>(G g) {
      if (vectors) run(t, g, std::integral_constant<int, kWidth>{});
      else run(t, g, std::integral_constant<int, 1>{});
    });
  });
}

}  // namespace optimus::cuda
