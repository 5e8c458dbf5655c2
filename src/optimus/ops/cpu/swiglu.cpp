// The gated activation a = silu(g) * u * gate, where h = (g, u) and silu(x) = x sigmoid(x), and its gradient:
//   dg = da * gate * u * s (1 + g (1 - s)),  du = da * gate * silu(g),  dgate = sum_f silu(g) u da,  s = sigmoid(g).
#include "optimus/ops/cpu/cpu_ops.h"
#include "optimus/ops/cpu/vector_math.h"

namespace optimus::cpu {
namespace {

constexpr int64_t kWorkEach = 4;  // an exponential and a division an element

int64_t bounded_rows(const Tensor& h_R2F, const Tensor& rows) {
  return rows ? std::min<int64_t>(*rows.as<int32_t>(), h_R2F.rows()) : h_R2F.rows();
}

}  // namespace

void CpuOps::swiglu(Tensor h_R2F, Tensor gates, Tensor slots, Tensor rows, Tensor a_RF) {
  const int64_t width = h_R2F.columns() / 2;
  const float* gate_of = gates ? gates.as<float>() : nullptr;
  const int32_t* slot_of = gates ? slots.as<int32_t>() : nullptr;
  with_real(h_R2F.dtype, [&]<typename T>(T) {
    const Rows<T> input(h_R2F), output(a_RF);
    parallel_ranges(bounded_rows(h_R2F, rows), kWorkEach * width, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float gate = gate_of ? gate_of[slot_of[r]] : 1.0f;
        const T* g = input[r];
        const T* u = g + width;
        T* a = output[r];
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
          const float x = float(g[i]);
          store(a[i], x * sigmoid(x) * float(u[i]) * gate);
        }
      }
    });
  });
}

void CpuOps::swiglu_backward(Tensor h_R2F, Tensor da_RF, Tensor gates, Tensor slots, Tensor rows, Tensor dh_R2F,
                             Tensor a_RF, Tensor dgates) {
  const int64_t width = h_R2F.columns() / 2;
  const float* gate_of = gates ? gates.as<float>() : nullptr;
  const int32_t* slot_of = gates || dgates ? slots.as<int32_t>() : nullptr;
  float* dgate_of = dgates ? dgates.as<float>() : nullptr;
  with_real(h_R2F.dtype, [&]<typename T>(T) {
    with_flag(bool(a_RF), [&](auto with_activation) {
      const Rows<T> input(h_R2F), output_gradient(da_RF), input_gradient(dh_R2F), output(a_RF);
      parallel_ranges(bounded_rows(h_R2F, rows), 2 * kWorkEach * width, [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const float gate = gate_of ? gate_of[slot_of[r]] : 1.0f;
          const T* g = input[r];
          const T* u = g + width;
          const T* da = output_gradient[r];
          T* dg = input_gradient[r];
          T* du = dg + width;
          T* a = with_activation ? output[r] : nullptr;
          float dgate = 0.0f;
#pragma omp simd reduction(+ : dgate)
          for (int64_t i = 0; i < width; ++i) {
            const float x = float(g[i]), up = float(u[i]), gradient = float(da[i]);
            const float s = sigmoid(x), silu = x * s;
            dgate += silu * up * gradient;
            if constexpr (with_activation) store(a[i], silu * up * gate);
            store(dg[i], gradient * gate * up * s * (1.0f + x * (1.0f - s)));
            store(du[i], gradient * gate * silu);
          }
          if (dgate_of) dgate_of[slot_of[r]] = dgate;
        }
      });
    });
  });
}

}  // namespace optimus::cpu
