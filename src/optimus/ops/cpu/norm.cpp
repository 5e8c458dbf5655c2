// RMS and layer normalisation of groups of W columns. With x_hat = (x - mean) r and g = dy * weight:
//   dx = r (g - mean(g) [layer only] - x_hat mean(g x_hat)) + addend
//   dweight = sum over rows and groups of dy x_hat,  dbias = the same of dy.
#include <cmath>

#include "optimus/ops/cpu/cpu_ops.h"

namespace optimus::cpu {
namespace {

constexpr int64_t kWorkEach = 2;
constexpr int64_t kLeastChunkRows = 16;  // rows whose weight gradients are summed before they meet other rows'
constexpr int64_t kMostChunks = 64;

/// The vector in f32 at `to`, or `missing` in every place when it is empty.
void load_vector(const Tensor& vector, int64_t width, float missing, float* to) {
  if (!vector) return void(std::fill_n(to, width, missing));
  with_real(vector.dtype, [&]<typename T>(T) {
    const T* from = vector.as<T>();
    for (int64_t i = 0; i < width; ++i) to[i] = float(from[i]);
  });
}

/// to (+)= the sum of the chunks' partial sums, in order.
void store_gradient(const float* partials, int64_t stride, int64_t chunks, int64_t width, Write write,
                    const Tensor& to) {
  with_real(to.dtype, [&]<typename G>(G) {
    G* gradient = to.as<G>();
    for (int64_t i = 0; i < width; ++i) {
      float sum = write == Write::accumulate ? float(gradient[i]) : 0.0f;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partials[chunk * stride + i];
      gradient[i] = G(sum);
    }
  });
}

}  // namespace

void CpuOps::norm(NormKind kind, float eps, int64_t groups, Tensor x, Tensor weight, Tensor bias, Tensor addend,
                  Tensor y, Tensor statistics) {
  const int64_t columns = x.columns(), width = columns / groups;
  expects(width * groups == columns, "norm of {} columns in {} groups", columns, groups);
  float* scale = scratch_.request<float>(2 * width);
  float* shift = scale + width;
  load_vector(weight, width, 1.0f, scale);
  load_vector(bias, width, 0.0f, shift);
  const Rows<float> statistics_rows(statistics);
  const float inverse_width = 1.0f / float(width);

  with_real(x.dtype, [&]<typename T>(T) {
    const Rows<T> inputs(x), addends(addend), outputs(y);
    parallel_ranges(x.rows(), kWorkEach * columns, [=](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t g = 0; g < groups; ++g) {
          const T* in = inputs[t] + g * width;
          const T* add = addends ? addends[t] + g * width : nullptr;
          T* out = outputs[t] + g * width;
          float mean = 0.0f;
          if (kind == NormKind::layer) {
#pragma omp simd reduction(+ : mean)
            for (int64_t i = 0; i < width; ++i) mean += float(in[i]);
            mean *= inverse_width;
          }
          float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
          for (int64_t i = 0; i < width; ++i) {
            const float centred = float(in[i]) - mean;
            squares += centred * centred;
          }
          const float r = 1.0f / std::sqrt(squares * inverse_width + eps);
          statistics_rows[t][2 * g] = mean;
          statistics_rows[t][2 * g + 1] = r;
          with_flag(add != nullptr, [=](auto with_addend) {
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) {
              float normed = (float(in[i]) - mean) * r * scale[i] + shift[i];
              if constexpr (with_addend) normed += float(add[i]);
              store(out[i], normed);
            }
          });
        }
      }
    });
  });
}

void CpuOps::norm_backward(NormKind kind, int64_t groups, Tensor x, Tensor weight, Tensor statistics, Tensor dy,
                           Tensor addend, Tensor dx, Tensor dweight, Tensor dbias, Write write) {
  const int64_t rows = x.rows(), columns = x.columns(), width = columns / groups;
  const int64_t chunk_rows = std::max(kLeastChunkRows, ceil_div(rows, kMostChunks));
  const int64_t chunks = ceil_div(rows, chunk_rows);
  float* scale = scratch_.request<float>(width * (1 + 2 * chunks));
  float* partials = scale + width;  // of each chunk: dweight [W], dbias [W]
  load_vector(weight, width, 1.0f, scale);
  const Rows<float> statistics_rows(statistics);
  const float inverse_width = 1.0f / float(width);

  with_real(x.dtype, [&]<typename T>(T) {
    const Rows<T> inputs(x), gradients(dy), addends(addend), outputs(dx);
    parallel_ranges(chunks, 2 * kWorkEach * columns * chunk_rows, [=](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        float* dweight_sum = partials + chunk * 2 * width;
        float* dbias_sum = dweight_sum + width;
        std::fill_n(dweight_sum, 2 * width, 0.0f);
        for (int64_t t = chunk * chunk_rows; t < std::min(rows, (chunk + 1) * chunk_rows); ++t) {
          for (int64_t g = 0; g < groups; ++g) {
            const T* in = inputs[t] + g * width;
            const T* gradient = gradients[t] + g * width;
            const T* add = addends ? addends[t] + g * width : nullptr;
            T* out = outputs[t] + g * width;
            const float mean = statistics_rows[t][2 * g], r = statistics_rows[t][2 * g + 1];
            float sum = 0.0f, projection = 0.0f;
#pragma omp simd reduction(+ : sum, projection)
            for (int64_t i = 0; i < width; ++i) {
              const float d = float(gradient[i]), x_hat = (float(in[i]) - mean) * r;
              sum += d * scale[i];
              projection += d * scale[i] * x_hat;
              dweight_sum[i] += d * x_hat;
              dbias_sum[i] += d;
            }
            const float mean_gradient = kind == NormKind::layer ? sum * inverse_width : 0.0f;
            const float mean_projection = projection * inverse_width;
            with_flag(add != nullptr, [=](auto with_addend) {
#pragma omp simd
              for (int64_t i = 0; i < width; ++i) {
                const float x_hat = (float(in[i]) - mean) * r;
                float d = r * (float(gradient[i]) * scale[i] - mean_gradient - x_hat * mean_projection);
                if constexpr (with_addend) d += float(add[i]);
                store(out[i], d);
              }
            });
          }
        }
      }
    });
  });
  if (dweight) store_gradient(partials, 2 * width, chunks, width, write, dweight);
  if (dbias) store_gradient(partials + width, 2 * width, chunks, width, write, dbias);
}

}  // namespace optimus::cpu
