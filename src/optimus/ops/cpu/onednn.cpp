#include "optimus/ops/cpu/onednn.h"

#include <algorithm>
#include <array>
#include <map>

#include <oneapi/dnnl/dnnl.h>
#include <oneapi/dnnl/dnnl.hpp>

namespace optimus::cpu {
namespace {

using dnnl::memory;

/// Everything that makes a primitive: sizes, pitches, and (ta, tb, accumulate, bf16 result) as bits.
using Key = std::array<int64_t, 7>;

memory::desc matrix(int64_t rows, int64_t columns, int64_t pitch, Transpose transpose, memory::data_type type) {
  const memory::dims strides = transpose == Transpose::no ? memory::dims{pitch, 1} : memory::dims{1, pitch};
  return memory::desc({rows, columns}, type, strides);
}

dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const memory::desc& a, const memory::desc& b,
                                      const memory::desc& c, const dnnl::primitive_attr& attributes) {
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::matmul::primitive_desc(engine, a, b, c, attributes);
#else
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attributes, engine);
#endif
}

struct Primitive {
  dnnl::matmul matmul;
  memory a, b, c;
};

}  // namespace

void sgemm(const Product& p, float alpha) {
  if (p.m == 0 || p.n == 0) return;
  if (p.k == 0) {  // the pitches of an empty operand are not valid ones
    for (int64_t i = 0; i < p.m && !p.accumulate; ++i) {
      std::fill_n(static_cast<float*>(p.c) + i * p.ldc, p.n, 0.0f);
    }
    return;
  }
  const dnnl_status_t status =
      dnnl_sgemm(p.ta == Transpose::no ? 'N' : 'T', p.tb == Transpose::no ? 'N' : 'T', p.m, p.n, p.k, alpha,
                 static_cast<const float*>(p.a), p.lda, static_cast<const float*>(p.b), p.ldb,
                 p.accumulate ? 1.0f : 0.0f, static_cast<float*>(p.c), p.ldc);
  expects(status == dnnl_success, "dnnl_sgemm refused m {} n {} k {} lda {} ldb {} ldc {} (status {})", p.m, p.n, p.k,
          p.lda, p.ldb, p.ldc, int(status));
}

struct Bf16Products::Cache {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::map<Key, Primitive> primitives;

  Primitive make(const Product& p, DType c_dtype) const {
    const auto bf16_type = memory::data_type::bf16;
    const auto c_type = c_dtype == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
    dnnl::primitive_attr attributes;
    if (p.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0f);
      attributes.set_post_ops(sum);
    }
    const auto a = matrix(p.m, p.k, p.lda, p.ta, bf16_type);
    const auto b = matrix(p.k, p.n, p.ldb, p.tb, bf16_type);
    const auto c = matrix(p.m, p.n, p.ldc, Transpose::no, c_type);
    return {dnnl::matmul(describe(engine, a, b, c, attributes)), memory(a, engine, nullptr), memory(b, engine, nullptr),
            memory(c, engine, nullptr)};
  }
};

Bf16Products::Bf16Products() : cache_(std::make_unique<Cache>()) {}
Bf16Products::~Bf16Products() = default;

bool Bf16Products::available() const {
  const auto isa = unsigned(dnnl::get_effective_cpu_isa());  // a set of bits, each instruction set including its base
  const auto wanted = unsigned(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & wanted) == wanted;
}

void Bf16Products::run(const Product& p, DType c_dtype) {
  expects(p.m > 0 && p.n > 0 && p.k > 0, "bf16 product with m {} n {} k {}", p.m, p.n, p.k);
  const int64_t flags =
      (p.ta == Transpose::yes) | (p.tb == Transpose::yes) << 1 | p.accumulate << 2 | (c_dtype == DType::bf16) << 3;
  const Key key{p.m, p.n, p.k, p.lda, p.ldb, p.ldc, flags};
  auto found = cache_->primitives.find(key);
  if (found == cache_->primitives.end()) found = cache_->primitives.emplace(key, cache_->make(p, c_dtype)).first;
  Primitive& primitive = found->second;
  primitive.a.set_data_handle(const_cast<void*>(p.a));
  primitive.b.set_data_handle(const_cast<void*>(p.b));
  primitive.c.set_data_handle(p.c);
  primitive.matmul.execute(cache_->stream,
                           {{DNNL_ARG_SRC, primitive.a}, {DNNL_ARG_WEIGHTS, primitive.b}, {DNNL_ARG_DST, primitive.c}});
  cache_->stream.wait();
}

}  // namespace optimus::cpu
