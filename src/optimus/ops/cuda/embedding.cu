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

/// offsets[v] = number of positions with a token below v, offsets[vocab] = all of them; sorted[offsets[v] ..] = those with
/// token v, ascending. Also clears the tickets of the kernel that follows.
__global__ void __launch_bounds__(kSortThreads)
    sort_positions_kernel(const int32_t* ids, int64_t tokens, int64_t vocab, int64_t padding_token, int32_t* offsets,
                          int32_t* sorted, int32_t* tickets, int64_t ticket_count) {
  __shared__ int32_t places[kSortWarps][kOwned];  // positions of a warp and row: their number, then where the next goes
  __shared__ int32_t totals[kOwned];
  const int thread = int(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const int64_t first_row = int64_t(blockIdx.x) * kOwned;
  const int64_t rows = vocab - first_row < kOwned ? vocab - first_row : kOwned;
  for (int64_t i = int64_t(blockIdx.x) * kSortThreads + thread; i < ticket_count;
       i += int64_t(gridDim.x) * kSortThreads)
    tickets[i] = 0;
  for (int i = thread; i < kSortWarps * kOwned; i += kSortThreads) places[i / kOwned][i % kOwned] = 0;
  __syncthreads();

  // Each warp has a run of the positions, a multiple of its width.
  const int64_t run = (tokens + kSortThreads - 1) / kSortThreads * kWarp;
  const int64_t begin = warp * run, end = begin + run;
  int32_t below = 0;
  const auto key_of = [&](int64_t t) {  // the row among the block's, or -1
    if (t >= tokens || t >= end) return -1;
    const int64_t id = ids[t];
    if (id == padding_token || id < 0) return -1;
    below += id < first_row;
    const int64_t row = id - first_row;
    return row >= 0 && row < rows ? int(row) : -1;
  };
  const unsigned lanes_before = (1u << lane) - 1;
  // visit(position, row, the warp's lanes with that row) of each 32 positions that the block's rows occur in.
  const auto each_of_run = [&](const auto& visit) {
    for (int64_t t = begin + lane; t - lane < end; t += kAhead * kWarp) {
      int keys[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) keys[i] = key_of(t + i * kWarp);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (!__any_sync(kAllLanes, keys[i] >= 0)) continue;
        visit(int32_t(t + i * kWarp), keys[i], __match_any_sync(kAllLanes, keys[i]));
        __syncwarp();
      }
    }
  };
  each_of_run([&](int32_t, int key, unsigned same) {
    if (key >= 0 && (same & lanes_before) == 0) places[warp][key] += __popc(same);
  });
  const int32_t base = reduce_block(below, Sum{});  // also a barrier

  if (thread < kOwned) {
    int32_t total = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int32_t count = places[w][thread];
      places[w][thread] = total;
      total += count;
    }
    totals[thread] = total;
  }
  __syncthreads();
  for (int distance = 1; distance < kOwned; distance *= 2) {  // inclusive sums over the rows
    const int32_t before = thread < kOwned && thread >= distance ? totals[thread - distance] : 0;
    __syncthreads();
    if (thread < kOwned) totals[thread] += before;
    __syncthreads();
  }
  for (int i = thread; i < kSortWarps * kOwned; i += kSortThreads) {
    const int row = i % kOwned;
    places[i / kOwned][row] += base + (row == 0 ? 0 : totals[row - 1]);
  }
  if (thread < rows) offsets[first_row + thread] = base + (thread == 0 ? 0 : totals[thread - 1]);
  if (thread == 0 && first_row + rows == vocab) offsets[vocab] = base + totals[kOwned - 1];
  __syncthreads();

  each_of_run([&](int32_t position, int key, unsigned same) {
    const int32_t place = key >= 0 ? places[warp][key] : 0;
    __syncwarp();
    if (key < 0) return;
    sorted[place + __popc(same & lanes_before)] = position;
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
__device__ void add_positions(const T* dy, int64_t pitch, const int32_t* sorted, int32_t begin, int32_t end,
                              int64_t column, float (&sum)[N]) {
#pragma unroll 4
  for (int32_t p = begin; p < end; ++p) add_elements<T, N>(dy + int64_t(sorted[p]) * pitch + column, sum);
}

struct Positions {
  const int32_t *ids, *offsets, *sorted;
  int32_t* tickets;  ///< of each chunk in which a shared row begins: chunks of that row that are summed
  float* partials;   ///< [chunks][2][columns]: of the row that began before the chunk, of one that begins in it
  int64_t vocab;
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
    if (item >= (accumulate ? at.offsets[at.vocab] : at.vocab)) return;
    const int64_t row = accumulate ? at.ids[at.sorted[item]] : item;
    const int32_t begin = at.offsets[row], end = at.offsets[row + 1];
    if (end - begin > at.chunk || (accumulate && begin != item)) return;
    float sum[N] = {};
    G* to = dw + row * dw_pitch + column;
    if (accumulate) add_elements<G, N>(to, sum);
    add_positions<T, N>(dy, dy_pitch, at.sorted, begin, end, column, sum);
    store_elements<G, N>(to, sum);
    return;
  }

  __shared__ bool last;
  const int32_t first = int32_t(blockIdx.x) * at.chunk, all = at.offsets[at.vocab];
  const int32_t past = all - first < at.chunk ? all : first + at.chunk;
  if (first >= past) return;
  const int32_t row_of_first = at.ids[at.sorted[first]], row_of_last = at.ids[at.sorted[past - 1]];
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    const int64_t row = which == 0 ? row_of_first : row_of_last;
    const int32_t row_begin = at.offsets[row], row_end = at.offsets[row + 1];
    if (row_end - row_begin <= at.chunk || (which == 1 && row == row_of_first)) continue;
    const int32_t begin = row_begin > first ? row_begin : first, end = row_end < past ? row_end : past;
    float* partial = at.partials + int64_t(blockIdx.x * 2 + (row_begin >= first)) * columns;
    for (int64_t column = threadIdx.x * N; column < columns; column += kThreads * N) {
      float sum[N] = {};
      add_positions<T, N>(dy, dy_pitch, at.sorted, begin, end, column, sum);
      store_elements<float, N>(partial + column, sum);
    }

    // Every thread's sums are visible to all before its block is counted.
    const int32_t first_chunk = row_begin / at.chunk, last_chunk = (row_end - 1) / at.chunk;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&at.tickets[first_chunk], 1) == last_chunk - first_chunk;
    __syncthreads();
    if (!last) continue;
    __threadfence();
    for (int64_t column = threadIdx.x * N; column < columns; column += kThreads * N) {
      float sum[N] = {};
      G* to = dw + row * dw_pitch + column;
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
  expects(tokens < (int64_t(1) << 30), "embedding_backward of {} tokens", tokens);

  scratch_.begin();
  int32_t* offsets = scratch_.take<int32_t>(vocab + 1);
  int32_t* sorted = scratch_.take<int32_t>(tokens);
  int32_t* tickets = scratch_.take<int32_t>(chunks);
  const Positions at{ids_T.as<int32_t>(),
                     offsets,
                     sorted,
                     tickets,
                     scratch_.take<float>(int64_t(chunks) * 2 * columns),
                     vocab,
                     chunk,
                     chunks};
  launch(sort_positions_kernel, ceil_div(vocab, kOwned), kSortThreads, 0, stream_, at.ids, tokens, vocab, padding_token,
         offsets, sorted, tickets, chunks);

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
