// The only door to oneDNN, whose versions 2 and 3 spell matrix products differently: f32 products by its BLAS call,
// bf16 products by cached matmul primitives.
#pragma once

#include <cstdint>
#include <memory>

#include "optimus/ops/ops.h"

namespace optimus::cpu {

/// c[m,n] = op(a) * op(b) (+ c), row-major. lda is the pitch of a as it is stored. Zero sizes are allowed.
struct Product {
  Transpose ta, tb;
  int64_t m, n, k;
  const void* a;
  int64_t lda;
  const void* b;
  int64_t ldb;
  void* c;
  int64_t ldc;
  bool accumulate;
};

/// a, b, c f32; c is scaled by nothing, the product by alpha. On every thread when called outside a parallel region, on
/// the calling one inside.
void sgemm(const Product& product, float alpha = 1.0f);

/// Products of bf16 matrices into f32 or bf16 on the CPU's bf16 instructions. Not to be shared between threads.
class Bf16Products {
 public:
  Bf16Products();
  ~Bf16Products();
  Bf16Products(const Bf16Products&) = delete;
  Bf16Products& operator=(const Bf16Products&) = delete;

  /// False where the CPU (or ONEDNN_MAX_CPU_ISA) has no such instructions; run() must not be called then.
  bool available() const;
  /// A primitive is made for every distinct shape, so callers keep their number small.
  void run(const Product& product, DType c_dtype);

 private:
  struct Cache;
  std::unique_ptr<Cache> cache_;
};

}  // namespace optimus::cpu
