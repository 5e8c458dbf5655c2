// y = op(a) op(b) + addend. f32 goes to the BLAS call, bf16 to the CPU's bf16 instructions where it has them; every
// other combination of types is computed in f32 copies and rounded once.
#include "optimus/ops/cpu/cpu_ops.h"
#include "optimus/ops/cpu/products.h"

namespace optimus::cpu {
namespace {

/// A contiguous f32 matrix at `data` in the shape of `like`.
Tensor f32_matrix(float* data, const Tensor& like) { return Tensor(data, DType::f32, {like.rows(), like.columns()}); }

}  // namespace

void CpuOps::matmul(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend) {
  const int64_t m = y.rows(), n = y.columns(), k = ta == Transpose::no ? a.columns() : a.rows();
  if (m == 0 || n == 0) return;
  expects(a.elements() == m * k && b.elements() == k * n && a.dtype == b.dtype, "matmul of {} {} and {} {} into {}",
          name_of(a.dtype), a.shape, name_of(b.dtype), b.shape, y.shape);
  Product product{ta, tb, m, n, k, a.data, a.pitch, b.data, b.pitch, y.data, y.pitch, bool(addend)};

  const bool bf16_native = a.dtype == DType::bf16 && k > 0 && bf16_products_.available();
  if (bf16_native || (a.dtype == DType::f32 && y.dtype == DType::f32)) {
    if (addend && !addend.same_view(y)) copy(addend, y);
    if (bf16_native) bf16_products_.run(product, y.dtype);
    else run_products({&product, 1});
    return;
  }

  float* scratch = product_scratch_.request<float>(m * k + k * n + m * n);
  const auto in_f32 = [&](const Tensor& operand) {
    if (operand.dtype == DType::f32) return operand;
    const Tensor converted = f32_matrix(scratch, operand);
    scratch += operand.elements();
    copy(operand.matrix(), converted);
    return converted;
  };
  a = in_f32(a);
  b = in_f32(b);
  const Tensor sum = y.dtype == DType::f32 ? y : f32_matrix(scratch, y);
  if (addend && !addend.same_view(sum)) copy(addend.matrix(), sum.matrix());
  product = {ta, tb, m, n, k, a.data, a.pitch, b.data, b.pitch, sum.data, sum.pitch, bool(addend)};
  run_products({&product, 1});
  if (y.dtype != DType::f32) copy(sum, y.matrix());
}

}  // namespace optimus::cpu
