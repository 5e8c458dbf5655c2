// Tensors for tests. A Workspace makes tensors on a device from host values, surrounds each with guard bytes, and runs
// a kernel call twice from the same state, so that every test of a kernel also proves that it
//   - is deterministic (bit-equal results of both calls),
//   - writes nothing outside the views it was given (guards, and the gaps between the rows of a pitched view),
//   - leaves its inputs alone, and
//   - writes its outputs whole: they start as NaN (every byte 0xFF), which no comparison accepts.
// Values travel as vectors of double in row-major order; a reference reads an input back, so that it computes from the
// rounded numbers that the kernel sees.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "optimus/tensor/device.h"

namespace optimus::test {

using Values = std::vector<double>;
using Indices = std::vector<int64_t>;
using Bytes = std::vector<std::byte>;

/// Where a tensor's rows lie: back to back, or as columns of a wider matrix.
enum class Layout { contiguous, pitched };

inline Values normal_values(int64_t count, uint64_t seed, double mean = 0, double deviation = 1) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(mean, deviation);
  Values out(static_cast<size_t>(count));
  for (double& value : out) value = normal(engine);
  return out;
}

inline Values to_values(const Indices& indices) { return Values(indices.begin(), indices.end()); }

namespace detail {

template <typename Visitor>
auto with_type(DType dtype, Visitor&& visitor) {
  switch (dtype) {
    case DType::f32: return visitor(float{});
    case DType::bf16: return visitor(bf16{});
    case DType::f64: return visitor(double{});
    case DType::i16: return visitor(int16_t{});
    case DType::i32: return visitor(int32_t{});
    case DType::i64: return visitor(int64_t{});
  }
  throw std::logic_error("unknown element type");
}

inline void encode(DType dtype, double value, std::byte* to) {
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    T element;
    if constexpr (std::is_same_v<T, bf16>) element = bf16(float(value));
    else element = T(value);
    std::memcpy(to, &element, sizeof(T));
  });
}

inline double decode(DType dtype, const std::byte* from) {
  return with_type(dtype, [&](auto type) {
    using T = decltype(type);
    T element;
    std::memcpy(&element, from, sizeof(T));
    if constexpr (std::is_same_v<T, bf16>) return double(float(element));
    else return double(element);
  });
}

}  // namespace detail

class Workspace {
 public:
  explicit Workspace(Device& device) : device_(device) {}
  ~Workspace() {
    for (const Block& block : blocks_) device_.release(block.whole.data, block.whole.bytes());
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  /// A tensor that a call may read only.
  Tensor input(DType dtype, Shape shape, const Values& values, Layout layout = Layout::contiguous) {
    return make(dtype, shape, &values, layout, false);
  }
  Tensor indices(Shape shape, const Indices& values) { return input(DType::i32, shape, to_values(values)); }
  /// A tensor that a call reads and writes.
  Tensor in_out(DType dtype, Shape shape, const Values& values, Layout layout = Layout::contiguous) {
    return make(dtype, shape, &values, layout, true);
  }
  /// A tensor that a call writes; NaN (i32: -1) until then.
  Tensor output(DType dtype, Shape shape, Layout layout = Layout::contiguous) {
    return make(dtype, shape, nullptr, layout, true);
  }

  Values read(const Tensor& tensor) const {
    const Bytes bytes = span_of(tensor);
    Values out;
    out.reserve(size_t(tensor.elements()));
    for (int64_t row = 0; row < tensor.rows(); ++row)
      for (int64_t column = 0; column < tensor.columns(); ++column)
        out.push_back(
            detail::decode(tensor.dtype, &bytes[size_t((row * tensor.pitch + column) * size_of(tensor.dtype))]));
    return out;
  }
  Indices read_indices(const Tensor& tensor) const {
    const Values values = read(tensor);
    return Indices(values.begin(), values.end());
  }
  /// True where every element still holds the bits that output() put there.
  bool untouched(const Tensor& tensor) const {
    const Bytes bytes = span_of(tensor);
    const int64_t row_bytes = tensor.columns() * size_of(tensor.dtype);
    for (int64_t row = 0; row < tensor.rows(); ++row)
      for (int64_t i = 0; i < row_bytes; ++i)
        if (bytes[size_t(row * tensor.pitch * size_of(tensor.dtype) + i)] != kPoison) return false;
    return true;
  }

  /// Runs `call` twice from the present state and checks what the head of this file promises.
  void run(const std::function<void()>& call) {
    const std::vector<Bytes> before = snapshot();
    call();
    const std::vector<Bytes> first = snapshot();
    for (size_t i = 0; i < blocks_.size(); ++i) device_.from_host(blocks_[i].whole, before[i].data());
    call();
    const std::vector<Bytes> second = snapshot();
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const Block& block = blocks_[i];
      const std::string name =
          fmt::format("tensor {} of the workspace, {} {}", i, name_of(block.view.dtype), block.view.shape.text());
      EXPECT_TRUE(first[i] == second[i]) << name << ": two calls gave different bits";
      if (block.writable) {
        EXPECT_TRUE(equal_outside(block, before[i], first[i])) << name << ": written outside the view";
      } else {
        EXPECT_TRUE(first[i] == before[i]) << name << ": an input was written";
      }
    }
  }

 private:
  static constexpr int64_t kGuardBytes = 256;  // keeps the alignment that arenas give
  static constexpr int64_t kGapColumns = 8;    // on both sides of a pitched view
  static constexpr std::byte kPoison{0xFF};

  struct Block {
    Tensor whole;  // guard, rows with their gaps, guard
    Tensor view;
    int64_t first;  // element of `whole` at which `view` begins
    bool writable;
  };

  Tensor make(DType dtype, Shape shape, const Values* values, Layout layout, bool writable) {
    const int64_t size = size_of(dtype), guard = kGuardBytes / size;
    const int64_t gap = layout == Layout::pitched ? kGapColumns : 0;
    Tensor view(nullptr, dtype, shape);
    view.pitch += 2 * gap;
    const int64_t elements = 2 * guard + view.rows() * view.pitch + 2 * gap;
    Block block{Tensor(device_.allocate(elements * size), dtype, {elements}), view, guard + gap, writable};
    block.view.data = static_cast<std::byte*>(block.whole.data) + block.first * size;

    Bytes bytes(size_t(elements * size), kPoison);
    if (values) {
      expects(int64_t(values->size()) == view.elements(), "{} values for a tensor {}", values->size(), shape.text());
      for (int64_t i = 0; i < view.elements(); ++i) {
        const int64_t element = block.first + i / view.columns() * view.pitch + i % view.columns();
        detail::encode(dtype, (*values)[size_t(i)], &bytes[size_t(element * size)]);
      }
    }
    device_.from_host(block.whole, bytes.data());
    blocks_.push_back(block);
    return block.view;
  }

  /// The bytes from the view's first element to its last, gaps included.
  Bytes span_of(const Tensor& view) const {
    if (view.elements() == 0) return {};
    const int64_t elements = (view.rows() - 1) * view.pitch + view.columns();
    Bytes out(size_t(elements * size_of(view.dtype)));
    device_.to_host_wait(out.data(), Tensor(view.data, view.dtype, {elements}));
    return out;
  }

  std::vector<Bytes> snapshot() const {
    std::vector<Bytes> out;
    for (const Block& block : blocks_) out.push_back(span_of(block.whole));
    return out;
  }

  static bool equal_outside(const Block& block, const Bytes& a, const Bytes& b) {
    const int64_t size = size_of(block.whole.dtype);
    for (int64_t element = 0; element < block.whole.elements(); ++element) {
      const int64_t i = element - block.first;
      const bool inside = block.view.elements() > 0 && i >= 0 && i / block.view.pitch < block.view.rows() &&
                          i % block.view.pitch < block.view.columns();
      if (!inside && std::memcmp(&a[size_t(element * size)], &b[size_t(element * size)], size_t(size)) != 0)
        return false;
    }
    return true;
  }

  Device& device_;
  std::vector<Block> blocks_;
};

/// |actual - expected| / |expected| in the Euclidean norm is within the tolerance, and so is, 32 times wider, the worst
/// element against its own size plus the root mean square: one wrong element among many hides from the norm alone.
/// Where expected is zero (up to the rounding of a reference in double), the error is absolute.
inline ::testing::AssertionResult close(const Values& actual, const Values& expected, double tolerance) {
  if (actual.size() != expected.size())
    return ::testing::AssertionFailure() << actual.size() << " elements, expected " << expected.size();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    difference += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  const bool zero = norm < 1e-20;
  const double error = std::sqrt(zero ? difference : difference / norm);
  const double rms = zero ? 1 : std::sqrt(norm / double(expected.size()));
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!(std::abs(actual[i] - expected[i]) <= 32 * tolerance * (rms + std::abs(expected[i]))))
      return ::testing::AssertionFailure() << "element " << i << " is " << actual[i] << ", expected " << expected[i]
                                           << " (norm error " << error << " of all " << expected.size() << ")";
  }
  if (!(error <= tolerance))
    return ::testing::AssertionFailure() << "norm error " << error << ", allowed " << tolerance;
  return ::testing::AssertionSuccess();
}

/// The norm error that a kernel with results of this element type is allowed.
inline double tolerance_of(DType dtype) { return dtype == DType::bf16 ? 1e-2 : 1e-5; }

}  // namespace optimus::test
