// How the CPU kernels share work between threads, and the scratch memory they keep.
//
// Ranges and chunks are functions of the problem's shape alone, never of timing; where a sum is cut into chunks they do
// not depend on the number of threads either, so that results are the same on any machine of the same instruction set.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

#include "optimus/tensor/dtype.h"
#include "optimus/tensor/tensor.h"

namespace optimus::cpu {

/// Element operations below which starting the other threads (a few microseconds) costs more than it saves.
inline constexpr int64_t kSerialWork = 16 * 1024;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// body(begin, end) over disjoint ranges that cover [0, count), one a thread. `work_each` is the number of element
/// operations of one item. The body must not throw.
template <typename Body>
void parallel_ranges(int64_t count, int64_t work_each, Body&& body) {
  if (count <= 0) return;
  const int64_t threads = std::min<int64_t>(omp_get_max_threads(), count);
  if (threads <= 1 || count * work_each < kSerialWork) return body(int64_t{0}, count);
#pragma omp parallel for schedule(static) num_threads(int(threads))
  for (int64_t i = 0; i < threads; ++i) body(count * i / threads, count * (i + 1) / threads);
}

/// body(task) for every task of [0, count), handed out in order to whichever thread is free.
template <typename Body>
void parallel_tasks(int64_t count, int64_t work_each, Body&& body) {
  const int64_t threads = std::min<int64_t>(omp_get_max_threads(), count);
  if (threads <= 1 || count * work_each < kSerialWork) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(int(threads))
  for (int64_t i = 0; i < count; ++i) body(i);
}

/// body(row, first_column, columns) over every element of a matrix; `flat` says that its rows follow each other
/// without gaps, so that it may be treated as a single long row.
template <typename Body>
void parallel_spans(int64_t rows, int64_t columns, bool flat, Body&& body) {
  if (flat) return parallel_ranges(rows * columns, 1, [&](int64_t b, int64_t e) { body(int64_t{0}, b, e - b); });
  parallel_ranges(rows, columns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row, int64_t{0}, columns);
  });
}

/// Runs f with a value of the tensor's element type, which must be real.
template <typename F>
void with_real(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16{});
    default: expects(false, "a kernel for f32 or bf16 got {}", name_of(dtype));
  }
}

/// Runs f with std::true_type or std::false_type, to keep a condition out of a vector loop.
template <typename F>
void with_flag(bool flag, F&& f) {
  if (flag) f(std::true_type{});
  else f(std::false_type{});
}

/// to = value, rounded. In a vector loop g++ copes with this, but not with a temporary bf16.
inline void store(float& to, float value) { to = value; }
inline void store(bf16& to, float value) { to.bits = bf16::rounded_bits(value); }

/// The rows of a tensor as T; null for an empty tensor. Made before a parallel region, it checks the type once.
template <typename T>
class Rows {
 public:
  explicit Rows(const Tensor& tensor) : data_(tensor ? tensor.as<T>() : nullptr), pitch_(tensor.pitch) {}
  T* operator[](int64_t row) const { return data_ + row * pitch_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  T* data_;
  int64_t pitch_;
};

/// Memory that grows to the largest request and is kept. Uninitialised; each request ends the previous one's use.
class Scratch {
 public:
  template <typename T>
  T* request(int64_t count) {
    const int64_t bytes = count * int64_t(sizeof(T));
    if (bytes > size_) {
      block_.reset();
      block_.reset(new (std::align_val_t{kAlignment}) std::byte[size_t(bytes)]);
      size_ = bytes;
    }
    return reinterpret_cast<T*>(block_.get());
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Release {
    void operator()(std::byte* block) const { ::operator delete[](block, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<std::byte[], Release> block_;
  int64_t size_ = 0;
};

}  // namespace optimus::cpu
