// The embedding's rows, and the sum of their gradients by token.
#include "optimus/ops/cpu/cpu_ops.h"

namespace optimus::cpu {

void CpuOps::embedding(Tensor ids_T, Tensor w_VD, Tensor y_TD) {
  const int64_t columns = w_VD.columns();
  const int32_t* ids = ids_T.as<int32_t>();
  with_real(w_VD.dtype, [&]<typename T>(T) {
    const Rows<T> weights(w_VD), result(y_TD);
    parallel_ranges(ids_T.elements(), columns, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) std::copy_n(weights[ids[t]], columns, result[t]);
    });
  });
}

// The positions of a token form a chain in ascending order. Whoever meets a token's first position sums the whole chain
// in f32 and writes the row once. Threads share the columns, so that one frequent token does not hold them up.
void CpuOps::embedding_backward(Tensor ids_T, Tensor dy_TD, Tensor dw_VD, int64_t padding_token, Write write) {
  constexpr int64_t kColumns = 64;
  const int64_t tokens = ids_T.elements(), vocab = dw_VD.rows(), columns = dw_VD.columns();
  const int32_t* ids = ids_T.as<int32_t>();
  if (write == Write::overwrite) fill(dw_VD, 0.0);

  int32_t* first = scratch_.request<int32_t>(vocab + tokens);
  int32_t* next = first + vocab;
  std::fill_n(first, vocab, -1);
  for (int64_t t = tokens - 1; t >= 0; --t) {
    if (ids[t] == padding_token) continue;
    next[t] = first[ids[t]];
    first[ids[t]] = int32_t(t);
  }

  with_real(dw_VD.dtype, [&]<typename G>(G) {
    with_real(dy_TD.dtype, [&]<typename T>(T) {
      const Rows<T> gradient(dy_TD);
      const Rows<G> result(dw_VD);
      parallel_ranges(ceil_div(columns, kColumns), tokens * kColumns, [&](int64_t begin, int64_t end) {
        float sum[kColumns];
        for (int64_t block = begin; block < end; ++block) {
          const int64_t column = block * kColumns, count = std::min(kColumns, columns - column);
          for (int64_t t = 0; t < tokens; ++t) {
            if (ids[t] == padding_token || first[ids[t]] != t) continue;
            G* row = result[ids[t]] + column;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) sum[i] = float(row[i]);
            for (int64_t u = t; u >= 0; u = next[u]) {
              const T* from = gradient[u] + column;
#pragma omp simd
              for (int64_t i = 0; i < count; ++i) sum[i] += float(from[i]);
            }
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) store(row[i], sum[i]);
          }
        }
      });
    });
  });
}

}  // namespace optimus::cpu
