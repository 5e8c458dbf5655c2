// The global norm, the values every parameter's update shares, split masters and AdamW. The maths is in ops.h.
//
// The update reads and writes each byte once, which is all that it takes: 26 or 28 bytes an element. A thread handles
// groups of four elements, f32 in accesses of 16 bytes and 16-bit types of 8. Where the operands do not begin at such
// boundaries, the elements before the first one that does are handled one by one, and so are those after the last whole
// group. Both ways compute with the same sequence of roundings, so a result does not depend on where a buffer is cut.
#include "optimus/ops/cuda/kernels.cuh"

namespace optimus::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 4;       ///< elements
constexpr int kGroupsEach = 2;  ///< of a thread
/// bf16 moments move fewer bytes and take more registers: more threads do better than more groups.
template <typename M>
constexpr int kAdamwGroupsEach = sizeof(M) == 2 ? 1 : 2;
constexpr int64_t kSumBlocks = 1056;  ///< 8 on each multiprocessor of an H200

/// Elements [head, head + kGroup * groups) are handled in groups, the others one by one.
struct Cut {
  int64_t count, head, groups;

  __host__ __device__ int64_t singles() const { return count - kGroup * groups; }
  int64_t blocks(int groups_each) const {
    return ceil_div(std::max(ceil_div(groups, groups_each), singles()), kThreads);
  }
};

struct Operand {
  uintptr_t address;
  int64_t size;  ///< of an element
};
Operand operand(const Tensor& tensor) { return {reinterpret_cast<uintptr_t>(tensor.data), size_of(tensor.dtype)}; }

/// For contiguous operands of `count` elements.
Cut cut_of(int64_t count, std::initializer_list<Operand> operands) {
  for (int64_t head = 0; head < std::min<int64_t>(kGroup, count); ++head) {
    const bool aligned = std::all_of(operands.begin(), operands.end(), [&](const Operand& operand) {
      return (operand.address + uintptr_t(head * operand.size)) % uintptr_t(kGroup * operand.size) == 0;
    });
    if (aligned) return {count, head, (count - head) / kGroup};
  }
  return {count, 0, 0};
}

/// The i-th of the elements that belong to no group.
__device__ int64_t single(const Cut& cut, int64_t i) { return i < cut.head ? i : i + kGroup * cut.groups; }

// ---- sums of squares ----

template <typename T>
__device__ double square(T x) {
  const double value = double(to_float(x));
  return value * value;
}

/// sums[block] = sum over the elements that the block visits. `head` elements lie before the first multiple of 16 bytes.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    sum_squares_kernel(const T* x, int64_t count, int64_t head, double* sums, bool add) {
  constexpr int kWidth = kVectorWidth<T>, kLoads = 4;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, threads = int64_t(gridDim.x) * kThreads;
  const int64_t vectors = (count - head) / kWidth, singles = count - vectors * kWidth;
  const T* body = x + head;
  double sum = 0;
  int64_t i = thread;
  for (; i + (kLoads - 1) * threads < vectors; i += kLoads * threads) {
    Vector<T, kWidth> values[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) values[k] = load_vector<T, kWidth>(body + (i + k * threads) * kWidth);
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += square(values[k][j]);
  }
  for (; i < vectors; i += threads) {
    const Vector<T, kWidth> values = load_vector<T, kWidth>(body + i * kWidth);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += square(values[j]);
  }
  for (int64_t k = thread; k < singles; k += threads) sum += square(x[k < head ? k : k + vectors * kWidth]);
  sum = reduce_block(sum, Sum{});
  if (threadIdx.x == 0) sums[blockIdx.x] = add ? sums[blockIdx.x] + sum : sum;
}

__global__ void __launch_bounds__(kThreads) add_sums_kernel(const double* sums, int64_t count, double* out) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += sums[i];
  sum = reduce_block(sum, Sum{});
  if (threadIdx.x == 0) *out += sum;
}

__global__ void clip_control_kernel(const double* squares, const double* loss, float clip_norm, float* control) {
  const double sum = *squares, norm = sqrt(sum), ratio = double(clip_norm) / (norm + 1e-6);
  control[kGradientNorm] = float(norm);
  control[kClip] = clip_norm > 0.0f && ratio < 1.0 ? float(ratio) : 1.0f;
  control[kFinite] = isfinite(sum) && isfinite(*loss) ? 1.0f : 0.0f;
}

// ---- split masters ----

__device__ float joined(uint16_t weight, uint16_t remainder) {
  return __uint_as_float((uint32_t(weight) << 16) + uint32_t(int32_t(int16_t(remainder))));
}
__device__ void split(float master, uint16_t& weight, uint16_t& remainder) {
  const uint32_t bits = __float_as_uint(master);
  weight = uint16_t((bits + 0x8000u) >> 16);
  remainder = uint16_t(bits);  // bits - (weight << 16), of which the lower half is that of bits
}

/// A step of the kernels below: elements [i, i + N).
template <int N>
__device__ void split_elements(const float* master, uint16_t* weight, uint16_t* remainder, int64_t i) {
  const Vector<float, N> masters = load_vector<float, N>(master + i);
  Vector<uint16_t, N> weights, remainders;
#pragma unroll
  for (int k = 0; k < N; ++k) split(masters[k], weights[k], remainders[k]);
  store_vector<uint16_t, N>(weight + i, weights);
  store_vector<uint16_t, N>(remainder + i, remainders);
}
template <int N>
__device__ void join_elements(const uint16_t* weight, const uint16_t* remainder, float* master, int64_t i) {
  const Vector<uint16_t, N> weights = load_vector<uint16_t, N>(weight + i);
  const Vector<uint16_t, N> remainders = load_vector<uint16_t, N>(remainder + i);
  Vector<float, N> masters;
#pragma unroll
  for (int k = 0; k < N; ++k) masters[k] = joined(weights[k], remainders[k]);
  store_vector<float, N>(master + i, masters);
}

__global__ void __launch_bounds__(kThreads)
    split_master_kernel(const float* __restrict__ master, uint16_t* __restrict__ weight,
                        uint16_t* __restrict__ remainder, Cut cut) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, threads = int64_t(gridDim.x) * kThreads;
#pragma unroll
  for (int k = 0; k < kGroupsEach; ++k)
    if (const int64_t group = thread + k * threads; group < cut.groups)
      split_elements<kGroup>(master, weight, remainder, cut.head + kGroup * group);
  if (thread < cut.singles()) split_elements<1>(master, weight, remainder, single(cut, thread));
}

__global__ void __launch_bounds__(kThreads)
    join_master_kernel(const uint16_t* __restrict__ weight, const uint16_t* __restrict__ remainder,
                       float* __restrict__ master, Cut cut) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, threads = int64_t(gridDim.x) * kThreads;
#pragma unroll
  for (int k = 0; k < kGroupsEach; ++k)
    if (const int64_t group = thread + k * threads; group < cut.groups)
      join_elements<kGroup>(weight, remainder, master, cut.head + kGroup * group);
  if (thread < cut.singles()) join_elements<1>(weight, remainder, master, single(cut, thread));
}

// ---- AdamW ----

/// What all elements of an update share.
struct AdamwFactors {
  float clip, keep, step, inverse_correction2, beta1, beta2, rest1, rest2, eps;
};

// Intrinsics say which product joins which sum: the compiler would choose anew for each use.
__device__ void update(const AdamwFactors& f, float gradient, float& m, float& v, float& master) {
  const float g = __fmul_rn(f.clip, gradient);
  m = __fmaf_rn(f.beta1, m, __fmul_rn(f.rest1, g));
  v = __fmaf_rn(f.beta2, v, __fmul_rn(__fmul_rn(f.rest2, g), g));
  const float denominator = __fadd_rn(__fsqrt_rn(__fmul_rn(v, f.inverse_correction2)), f.eps);
  master = __fmaf_rn(master, f.keep, -__fdiv_rn(__fmul_rn(f.step, m), denominator));
}

/// A word for each of the N elements from index `first` on, a multiple of N: word i % 4 of the generator's block i / 4.
template <int N>
__device__ void random_words(const Philox& generator, uint64_t step, uint64_t first, uint32_t (&words)[N]) {
  static_assert(N == 1 || N == kGroup);
  uint32_t block[4];
  generator(first / 4, step, block);
  if constexpr (N == 1) {
    const uint64_t which = first % 4;
    words[0] = which == 0 ? block[0] : which == 1 ? block[1] : which == 2 ? block[2] : block[3];
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) words[i] = block[i];
  }
}

__device__ bfloat rounded(float value, uint32_t random) {
  return __ushort_as_bfloat16(uint16_t((__float_as_uint(value) + (random & 0xFFFFu)) >> 16));
}

/// The operands of N elements. Split says that the master is `weight` and `remainder`, else it is f32.
template <typename G, typename M, bool Split, int N>
struct AdamwElements {
  Vector<G, N> gradients;
  Vector<M, N> m, v;
  Vector<float, Split ? 1 : N> masters;
  Vector<uint16_t, Split ? N : 1> weights, remainders;
};

template <typename G, typename M, bool Split>
struct AdamwPointers {
  const G* gradient;
  M *m, *v;
  float* master;                 ///< unless Split
  uint16_t *weight, *remainder;  ///< if Split

  template <int N>
  __device__ void load(int64_t i, AdamwElements<G, M, Split, N>& elements) const {
    elements.gradients = load_vector<G, N>(gradient + i);
    elements.m = load_vector<M, N>(m + i);
    elements.v = load_vector<M, N>(v + i);
    if constexpr (Split) {
      elements.weights = load_vector<uint16_t, N>(weight + i);
      elements.remainders = load_vector<uint16_t, N>(remainder + i);
    } else {
      elements.masters = load_vector<float, N>(master + i);
    }
  }

  template <int N>
  __device__ void update_and_store(const AdamwFactors& factors, const AdamwConstants& constants, int64_t i,
                                   AdamwElements<G, M, Split, N>& elements) const {
    uint32_t words[N];
    if constexpr (sizeof(M) == 2)
      random_words<N>(constants.rounding, constants.step, uint64_t(constants.first_index + i), words);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float first = to_float(elements.m[k]), second = to_float(elements.v[k]), value;
      if constexpr (Split) value = joined(elements.weights[k], elements.remainders[k]);
      else value = elements.masters[k];
      update(factors, to_float(elements.gradients[k]), first, second, value);
      if constexpr (sizeof(M) == 2) {
        elements.m[k] = rounded(first, words[k]);
        elements.v[k] = rounded(second, words[k] >> 16);
      } else {
        elements.m[k] = first;
        elements.v[k] = second;
      }
      if constexpr (Split) split(value, elements.weights[k], elements.remainders[k]);
      else elements.masters[k] = value;
    }
    store_vector<M, N>(m + i, elements.m);
    store_vector<M, N>(v + i, elements.v);
    if constexpr (Split) {
      store_vector<uint16_t, N>(weight + i, elements.weights);
      store_vector<uint16_t, N>(remainder + i, elements.remainders);
    } else {
      store_vector<float, N>(master + i, elements.masters);
    }
  }
};

// Operands are asked for before the control values are looked at: they are needed in all steps but a few.
template <typename G, typename M, bool Split>
__global__ void __launch_bounds__(kThreads, 4)
    adamw_kernel(AdamwConstants constants, const float* control, AdamwPointers<G, M, Split> pointers, Cut cut) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  constexpr int kEach = kAdamwGroupsEach<M>;
  const int64_t first_group = int64_t(blockIdx.x) * (kThreads * kEach) + threadIdx.x;
  AdamwElements<G, M, Split, kGroup> elements[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (const int64_t group = first_group + k * kThreads; group < cut.groups)
      pointers.load(cut.head + kGroup * group, elements[k]);

  if (control[kFinite] == 0.0f) return;
  const AdamwFactors factors{control[kClip],
                             1.0f - control[kLearningRate] * constants.weight_decay,
                             control[kLearningRate] / control[kCorrection1],
                             1.0f / control[kCorrection2],
                             constants.beta1,
                             constants.beta2,
                             1.0f - constants.beta1,
                             1.0f - constants.beta2,
                             constants.eps};
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (const int64_t group = first_group + k * kThreads; group < cut.groups)
      pointers.update_and_store(factors, constants, cut.head + kGroup * group, elements[k]);

  if (thread < cut.singles()) {
    const int64_t i = single(cut, thread);
    AdamwElements<G, M, Split, 1> element;
    pointers.load(i, element);
    pointers.update_and_store(factors, constants, i, element);
  }
}

}  // namespace

void CudaOps::sum_squares(Tensor x, Tensor out) {
  const int64_t count = x.elements();
  if (count == 0) return;
  constexpr int64_t kBytesEach = 64, kBytesAlone = 256;  // of a thread of many blocks, and of the only block
  const int64_t blocks =
      x.bytes() <= kThreads * kBytesAlone ? 1 : std::min(kSumBlocks, ceil_div(x.bytes(), kThreads * kBytesEach));
  const uintptr_t past = reinterpret_cast<uintptr_t>(x.data) % 16;
  const int64_t head = std::min<int64_t>(count, past == 0 ? 0 : int64_t(16 - past) / size_of(x.dtype));
  scratch_.begin();
  double* sums = blocks == 1 ? out.as<double>() : scratch_.take<double>(blocks);
  with_real(x.dtype, [&]<typename T>(T) {
    launch(sum_squares_kernel<T>, blocks, kThreads, 0, stream_, pointer<const T>(x), count, head, sums, blocks == 1);
  });
  if (blocks > 1) launch(add_sums_kernel, 1, kThreads, 0, stream_, sums, blocks, out.as<double>());
}

void CudaOps::clip_control(Tensor squares, Tensor loss, float clip_norm, Tensor control) {
  launch(clip_control_kernel, 1, 1, 0, stream_, squares.as<double>(), loss.as<double>(), clip_norm,
         control.as<float>());
}

void CudaOps::split_master(Tensor master, Tensor weight, Tensor remainder) {
  const Cut cut = cut_of(master.elements(), {operand(master), operand(weight), operand(remainder)});
  launch(split_master_kernel, cut.blocks(kGroupsEach), kThreads, 0, stream_, master.as<float>(),
         pointer<uint16_t>(weight), pointer<uint16_t>(remainder), cut);
}

void CudaOps::join_master(Tensor weight, Tensor remainder, Tensor master) {
  const Cut cut = cut_of(master.elements(), {operand(master), operand(weight), operand(remainder)});
  launch(join_master_kernel, cut.blocks(kGroupsEach), kThreads, 0, stream_, pointer<uint16_t>(weight),
         pointer<uint16_t>(remainder), master.as<float>(), cut);
}

void CudaOps::adamw(const AdamwConstants& constants, Tensor control, Tensor gradient, Tensor master, Tensor m, Tensor v,
                    Tensor weight) {
  const bool is_split = weight.dtype == DType::bf16;
  expects(m.dtype == v.dtype, "adamw: moments in {} and {}", name_of(m.dtype), name_of(v.dtype));
  expects(is_split ? master.dtype == DType::i16 : master.dtype == DType::f32 && master.data == weight.data,
          "adamw: a weight in {} with a master in {}", name_of(weight.dtype), name_of(master.dtype));
  // Groups also begin where the random numbers' do: the index counts as an address of elements of one byte.
  const Operand index = m.dtype == DType::bf16 ? Operand{uintptr_t(constants.first_index), 1} : operand(gradient);
  const Cut cut =
      cut_of(weight.elements(), {operand(gradient), operand(master), operand(m), operand(v), operand(weight), index});
  const auto run = [&]<typename G, typename M, bool Split>(const AdamwPointers<G, M, Split>& pointers) {
    launch(adamw_kernel<G, M, Split>, cut.blocks(kAdamwGroupsEach<M>), kThreads, 0, stream_, constants,
           control.as<float>(), pointers, cut);
  };
  with_real(gradient.dtype, [&]<typename G>(G) {
    with_real(m.dtype, [&]<typename M>(M) {
      const G* gradients = pointer<const G>(gradient);
      M *first = pointer<M>(m), *second = pointer<M>(v);
      if (is_split)
        run(AdamwPointers<G, M, true>{gradients, first, second, nullptr, pointer<uint16_t>(weight),
                                      pointer<uint16_t>(master)});
      else run(AdamwPointers<G, M, false>{gradients, first, second, pointer<float>(weight), nullptr, nullptr});
    });
  });
}

}  // namespace optimus::cuda
