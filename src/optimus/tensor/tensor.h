// Tensor: a non-owning view of device memory with a row pitch. It is small, copied by value, and says nothing about
// who owns the bytes (an Arena does, see arena.h). An empty tensor (no data) stands for "not given".
//
// All dimensions but the last are contiguous in units of the pitch: element (i, j, k) of [A,B,C] lies at
// (i*B + j)*pitch + k. That covers whole tensors, row ranges, and column ranges of a fused matrix (q inside qkv).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <initializer_list>
#include <string>

#include "optimus/tensor/dtype.h"

namespace optimus {

/// Up to four dimensions.
class Shape {
 public:
  static constexpr int kMaxRank = 4;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) {
    expects(dims.size() <= size_t(kMaxRank), "Shape: {} dimensions, at most {}", dims.size(), kMaxRank);
    for (int64_t dim : dims) dims_[size_t(rank_++)] = dim;
  }

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[size_t(i < 0 ? rank_ + i : i)]; }
  int64_t& operator[](int i) { return dims_[size_t(i < 0 ? rank_ + i : i)]; }
  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= dims_[size_t(i)];
    return n;
  }
  bool operator==(const Shape&) const = default;
  std::string text() const;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

}  // namespace optimus

/// Shapes print themselves only where a message is needed: checks on hot paths pass them, not their text.
template <>
struct fmt::formatter<optimus::Shape> : fmt::formatter<std::string_view> {
  template <typename FormatContext>
  auto format(const optimus::Shape& shape, FormatContext& context) const {
    return fmt::formatter<std::string_view>::format(shape.text(), context);
  }
};

namespace optimus {

struct Tensor {
  void* data = nullptr;
  Shape shape;
  int64_t pitch = 0;  ///< elements from one row to the next; >= columns()
  DType dtype = DType::f32;

  Tensor() = default;
  Tensor(void* data, DType dtype, Shape shape)
      : data(data), shape(shape), pitch(shape.rank() == 0 ? 1 : shape[-1]), dtype(dtype) {}

  explicit operator bool() const { return data != nullptr; }
  int64_t elements() const { return shape.elements(); }
  int64_t columns() const { return shape.rank() == 0 ? 1 : shape[-1]; }
  int64_t rows() const { return columns() == 0 ? 0 : elements() / columns(); }
  int64_t bytes() const { return elements() * size_of(dtype); }
  bool contiguous() const { return pitch == columns() || rows() <= 1; }

  /// The elements as T; a wrong type is a bug.
  template <typename T>
  T* as() const {
    expects(dtype == dtype_of<T>(), "tensor {} holds {}, read as {}", shape, name_of(dtype), name_of(dtype_of<T>()));
    return static_cast<T*>(data);
  }
  std::byte* at_row(int64_t row) const { return static_cast<std::byte*>(data) + row * pitch * size_of(dtype); }

  /// Entries [begin, begin + count) of the first dimension.
  Tensor slice(int64_t begin, int64_t count) const;
  /// Entry i of the first dimension, without that dimension.
  Tensor operator[](int64_t i) const;
  /// Columns [begin, begin + count) of every row.
  Tensor column_slice(int64_t begin, int64_t count) const;
  /// The same contiguous elements under another shape.
  Tensor reshape(Shape to) const;
  /// All rows as one matrix [rows, columns].
  Tensor matrix() const;
  bool same_view(const Tensor& other) const {
    return data == other.data && shape == other.shape && pitch == other.pitch;
  }
};

}  // namespace optimus
