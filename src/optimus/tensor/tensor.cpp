#include "optimus/tensor/tensor.h"

namespace optimus {

std::string Shape::text() const {
  std::string out = "[";
  for (int i = 0; i < rank_; ++i) out += fmt::format("{}{}", i ? "," : "", dims_[size_t(i)]);
  return out + "]";
}

Tensor Tensor::slice(int64_t begin, int64_t count) const {
  expects(shape.rank() >= 1 && begin >= 0 && count >= 0 && begin + count <= shape[0], "slice [{}, {}) of tensor {}",
          begin, begin + count, shape);
  const int64_t rows_each = shape[0] == 0 || shape.rank() == 1 ? 0 : rows() / shape[0];
  Tensor out = *this;
  out.shape[0] = count;
  if (shape.rank() == 1) {
    out.data = static_cast<std::byte*>(data) + begin * size_of(dtype);
    out.pitch = count;
  } else {
    out.data = at_row(begin * rows_each);
  }
  return out;
}

Tensor Tensor::operator[](int64_t i) const {
  expects(shape.rank() >= 2, "index into tensor {}", shape);
  const Tensor part = slice(i, 1);
  Tensor out = part;
  out.shape = Shape{};
  Shape rest = shape.rank() == 2   ? Shape{shape[1]}
               : shape.rank() == 3 ? Shape{shape[1], shape[2]}
                                   : Shape{shape[1], shape[2], shape[3]};
  out.shape = rest;
  return out;
}

Tensor Tensor::column_slice(int64_t begin, int64_t count) const {
  expects(shape.rank() >= 1 && begin >= 0 && begin + count <= columns(), "columns [{}, {}) of tensor {}", begin,
          begin + count, shape);
  Tensor out = *this;
  out.data = static_cast<std::byte*>(data) + begin * size_of(dtype);
  out.shape[-1] = count;
  return out;
}

Tensor Tensor::reshape(Shape to) const {
  expects(contiguous() && to.elements() == elements(), "reshape of tensor {} (pitch {}) to {}", shape, pitch, to);
  return Tensor(data, dtype, to);
}

Tensor Tensor::matrix() const {
  Tensor out = *this;
  out.shape = Shape{rows(), columns()};
  return out;
}

}  // namespace optimus
