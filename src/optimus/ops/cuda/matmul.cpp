// y[M,N] = op(a) op(b) + addend by cuBLASLt, which knows matrices by columns: the row-major y with a pitch is the
// column-major y^T [N,M], and y^T = op(b)^T op(a)^T. So b is the first operand, a the second, and an operand is "transposed"
// for the library where it is for us.
//
// Sums are f32: CUBLAS_COMPUTE_32F, which for f32 operands means f32 products too (TF32 has compute types of its own). Where
// the library cuts K into parts, only the scheme that keeps parts in f32 and adds them in a separate step is allowed: the
// others round parts to bf16. It has no atomics, so a product is the same bits each time.
//
// f32 operands with a bf16 result are no combination of the library: such a product goes into f32 scratch, by pieces of
// rows.
#include "optimus/ops/cuda/matmul.h"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>
#include <vector>

#include "optimus/base/log.h"
#include "optimus/ops/cuda/cublas_lt.h"
#include "optimus/ops/cuda/cuda_ops.h"

namespace optimus::cuda {
namespace {

constexpr int64_t kWorkspaceBytes = int64_t(32) << 20;
/// Of the f32 sums of a piece: what the scratch has beside the workspace, less what rounding up to 256 may take.
constexpr int64_t kPieceBytes = kScratchBytes - kWorkspaceBytes - (int64_t(1) << 20);
constexpr int kCandidates = 8;
constexpr int kTimedRounds = 3, kRunsPerRound = 10;

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const ErrorKind kind = status == CUBLAS_STATUS_ALLOC_FAILED ? ErrorKind::kMemory : ErrorKind::kCommunication;
  fail(kind, "the GPU failed: {} in {}", cublas_lt().cublasLtGetStatusName(status), call);
}
/// `call` is a function's name and its arguments.
#define OPTIMUS_CUBLAS(call) check(cublas_lt().call, #call)

cudaDataType type_of(DType dtype) {
  expects(dtype == DType::f32 || dtype == DType::bf16, "a product of {}", name_of(dtype));
  return dtype == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
}

/// Of an address, as far as the library asks.
int64_t alignment_of(const void* data) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  return address == 0 ? 256 : std::min<int64_t>(256, int64_t(address & -address));
}

int64_t leading_dimension(const Tensor& tensor) { return std::max(tensor.pitch, tensor.columns()); }

/// All that the choice of an algorithm may depend on.
struct Key {
  int64_t m, n, k;
  Transpose ta, tb;
  DType in, out;
  bool addend, in_place;
  int64_t pitch_a, pitch_b, pitch_y, pitch_c;
  int64_t align_a, align_b, align_y, align_c;

  auto operator<=>(const Key&) const = default;
};

Key key_of(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, const Tensor& y, const Tensor& addend) {
  // Without an addend C is y itself, unread.
  const Tensor& c = addend ? addend : y;
  const bool in_place = c.data == y.data;
  expects(!in_place || leading_dimension(c) == leading_dimension(y), "matmul: the addend overlaps y");
  return {y.rows(),
          y.columns(),
          ta == Transpose::no ? a.columns() : a.rows(),
          ta,
          tb,
          a.dtype,
          y.dtype,
          bool(addend),
          in_place,
          leading_dimension(a),
          leading_dimension(b),
          leading_dimension(y),
          leading_dimension(c),
          alignment_of(a.data),
          alignment_of(b.data),
          alignment_of(y.data),
          alignment_of(c.data)};
}

std::string text_of(const Key& key) {
  const char* addend = !key.addend ? "none" : key.in_place ? "same" : "other";
  return fmt::format("{}{} m={} n={} k={} {}>{} addend={} pitch={},{},{},{} align={},{},{},{}",
                     key.ta == Transpose::yes ? 't' : 'n', key.tb == Transpose::yes ? 't' : 'n', key.m, key.n, key.k,
                     name_of(key.in), name_of(key.out), addend, key.pitch_a, key.pitch_b, key.pitch_y, key.pitch_c,
                     key.align_a, key.align_b, key.align_y, key.align_c);
}

/// A product's descriptors, which live in place (no handles to give back), and the algorithm chosen.
struct Plan {
  cublasLtMatmulDescOpaque_t product{};
  cublasLtMatrixLayoutOpaque_t first{}, second{}, c{}, d{};
  cublasLtMatmulAlgo_t algorithm{};
};

/// The descriptors of `key`; the algorithm is left open.
Plan describe(const Key& key) {
  Plan plan;
  OPTIMUS_CUBLAS(cublasLtMatmulDescInit_internal(&plan.product, sizeof plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const auto set_transpose = [&](cublasLtMatmulDescAttributes_t attribute, Transpose transpose) {
    const cublasOperation_t operation = transpose == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int32_t value = operation;
    OPTIMUS_CUBLAS(cublasLtMatmulDescSetAttribute(&plan.product, attribute, &value, sizeof value));
  };
  set_transpose(CUBLASLT_MATMUL_DESC_TRANSA, key.tb);
  set_transpose(CUBLASLT_MATMUL_DESC_TRANSB, key.ta);
  const auto layout = [](cublasLtMatrixLayoutOpaque_t& to, DType type, int64_t rows, int64_t columns, int64_t pitch) {
    // Our columns are the library's rows.
    OPTIMUS_CUBLAS(
        cublasLtMatrixLayoutInit_internal(&to, sizeof to, type_of(type), uint64_t(columns), uint64_t(rows), pitch));
  };
  const bool ta = key.ta == Transpose::yes, tb = key.tb == Transpose::yes;
  layout(plan.first, key.in, tb ? key.n : key.k, tb ? key.k : key.n, key.pitch_b);
  layout(plan.second, key.in, ta ? key.k : key.m, ta ? key.m : key.k, key.pitch_a);
  layout(plan.c, key.out, key.m, key.n, key.pitch_c);
  layout(plan.d, key.out, key.m, key.n, key.pitch_y);
  return plan;
}

}  // namespace

struct Matmuls::State {
  explicit State(CudaDevice& device) : device(device), stream(device.stream()) {
    OPTIMUS_CUBLAS(cublasLtCreate(&handle));
  }
  ~State() { cublas_lt().cublasLtDestroy(handle); }

  std::vector<cublasLtMatmulAlgo_t> candidates(const Key& key, Plan& plan);
  const Plan& plan_of(const Key& key);
  cublasStatus_t launch(Plan plan, const Tensor& a, const Tensor& b, const Tensor& y, const Tensor& addend,
                        void* workspace);

  CudaDevice& device;
  cudaStream_t stream;
  cublasLtHandle_t handle = nullptr;
  Choices choices;
  std::map<Key, Plan> plans;
};

/// The library's list for a product, the best estimate first.
std::vector<cublasLtMatmulAlgo_t> Matmuls::State::candidates(const Key& key, Plan& plan) {
  cublasLtMatmulPreferenceOpaque_t preference{};
  OPTIMUS_CUBLAS(cublasLtMatmulPreferenceInit_internal(&preference, sizeof preference));
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    OPTIMUS_CUBLAS(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(kWorkspaceBytes));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(key.align_b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(key.align_a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(key.align_c));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(key.align_y));

  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found{};
  int count = 0;
  const cublasStatus_t status =
      cublas_lt().cublasLtMatmulAlgoGetHeuristic(handle, &plan.product, &plan.first, &plan.second, &plan.c, &plan.d,
                                                 &preference, kCandidates, found.data(), &count);
  // That one means that none was found.
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "cublasLtMatmulAlgoGetHeuristic");
  std::vector<cublasLtMatmulAlgo_t> out;
  for (int i = 0; i < count; ++i) {
    const cublasLtMatmulHeuristicResult_t& one = found[size_t(i)];
    if (one.state != CUBLAS_STATUS_SUCCESS || one.workspaceSize > size_t(kWorkspaceBytes)) continue;
    int32_t out_of_place = 1;  // C other than D
    size_t written = 0;
    const cublasStatus_t asked = cublas_lt().cublasLtMatmulAlgoCapGetAttribute(
        &one.algo, CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT, &out_of_place, sizeof out_of_place, &written);
    if (!key.in_place && asked == CUBLAS_STATUS_SUCCESS && out_of_place == 0) continue;
    out.push_back(one.algo);
  }
  expects(!out.empty(), "cuBLASLt {} has no algorithm for {}", cublas_lt().cublasLtGetVersion(), text_of(key));
  return out;
}

const Plan& Matmuls::State::plan_of(const Key& key) {
  if (const auto known = plans.find(key); known != plans.end()) return known->second;
  Plan plan = describe(key);
  const std::vector<cublasLtMatmulAlgo_t> list = candidates(key, plan);
  size_t choice = 0;
  if (!choices.empty()) {
    const auto chosen = choices.find(text_of(key));
    if (chosen != choices.end() && chosen->second >= 0 && size_t(chosen->second) < list.size())
      choice = size_t(chosen->second);
  }
  plan.algorithm = list[choice];
  return plans.emplace(key, plan).first->second;
}

cublasStatus_t Matmuls::State::launch(Plan plan, const Tensor& a, const Tensor& b, const Tensor& y,
                                      const Tensor& addend, void* workspace) {
  const float alpha = 1, beta = addend ? 1 : 0;
  return cublas_lt().cublasLtMatmul(handle, &plan.product, &alpha, b.data, &plan.first, a.data, &plan.second, &beta,
                                    addend ? addend.data : y.data, &plan.c, y.data, &plan.d, &plan.algorithm, workspace,
                                    size_t(kWorkspaceBytes), stream);
}

Matmuls::Matmuls(CudaDevice& device) : state_(std::make_unique<State>(device)) {}

Matmuls::~Matmuls() = default;

void Matmuls::run(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend, Scratch& scratch) {
  const Plan& plan = state_->plan_of(key_of(a, ta, b, tb, y, addend));
  check(state_->launch(plan, a, b, y, addend, scratch.take<std::byte>(kWorkspaceBytes)), "cublasLtMatmul");
}

std::string Matmuls::choices_header() const {
  cudaDeviceProp properties;
  OPTIMUS_CUDA(cudaGetDeviceProperties(&properties, state_->device.index()));
  return fmt::format("{}, cuBLASLt {}", properties.name, cublas_lt().cublasLtGetVersion());
}

const Matmuls::Choices& Matmuls::choices() const { return state_->choices; }

void Matmuls::set_choices(Choices choices) {
  state_->choices = std::move(choices);
  state_->plans.clear();
}

std::string Matmuls::key(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend) const {
  return text_of(key_of(a, ta, b, tb, y, addend));
}

void Matmuls::tune(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend, Scratch& scratch) {
  const Key key = key_of(a, ta, b, tb, y, addend);
  Plan plan = describe(key);
  const std::vector<cublasLtMatmulAlgo_t> list = state_->candidates(key, plan);
  std::byte* workspace = scratch.take<std::byte>(kWorkspaceBytes);
  const Event begin(cudaEventDefault), end(cudaEventDefault);
  int best = 0;
  float best_time = std::numeric_limits<float>::infinity(), first_time = best_time;
  for (size_t i = 0; i < list.size(); ++i) {
    plan.algorithm = list[i];
    const auto run = [&] { return state_->launch(plan, a, b, y, addend, workspace); };
    if (run() != CUBLAS_STATUS_SUCCESS) continue;  // it also loads the kernel
    for (int round = 0; round < kTimedRounds; ++round) {
      OPTIMUS_CUDA(cudaEventRecord(begin, state_->stream));
      for (int j = 0; j < kRunsPerRound; ++j) check(run(), "cublasLtMatmul");
      OPTIMUS_CUDA(cudaEventRecord(end, state_->stream));
      OPTIMUS_CUDA(cudaEventSynchronize(end));
      float time = 0;
      OPTIMUS_CUDA(cudaEventElapsedTime(&time, begin, end));
      if (i == 0) first_time = std::min(first_time, time);
      if (time < best_time) best_time = time, best = int(i);
    }
  }
  log().info("product {}: {:.1f} us by the first of {} algorithms, {:.1f} us by number {}", text_of(key),
             1e3f * first_time / kRunsPerRound, list.size(), 1e3f * best_time / kRunsPerRound, best + 1);
  plan.algorithm = list[size_t(best)];
  state_->plans.insert_or_assign(key, plan);
  state_->choices.insert_or_assign(text_of(key), best);
}

void CudaOps::matmul(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend) {
  const int64_t m = y.rows(), n = y.columns(), k = ta == Transpose::no ? a.columns() : a.rows();
  if (m == 0 || n == 0) return;
  expects(a.elements() == m * k && b.elements() == k * n && a.dtype == b.dtype &&
              (!addend || (addend.rows() == m && addend.columns() == n && addend.dtype == y.dtype)),
          "matmul of {} {} and {} {} into {} {}", name_of(a.dtype), a.shape, name_of(b.dtype), b.shape,
          name_of(y.dtype), y.shape);
  if (k == 0) {
    if (!addend) fill(y, 0);
    else if (addend.data != y.data) copy(addend.matrix(), y.matrix());
    return;
  }
  scratch_.begin();
  if (a.dtype == DType::bf16 || y.dtype == DType::f32) {
    if (tuning_ && !matmuls_->chosen(a, ta, b, tb, y, addend)) {
      matmuls_->tune(a, ta, b, tb, y, addend, scratch_);
      scratch_.begin();
    }
    return matmuls_->run(a, ta, b, tb, y, addend, scratch_);
  }

  const int64_t rows_a_piece = std::min(m, kPieceBytes / int64_t(sizeof(float)) / n);
  expects(rows_a_piece > 0, "matmul: a row of {} f32 sums does not fit the scratch", n);
  a = a.matrix();
  y = y.matrix();
  for (int64_t row = 0; row < m; row += rows_a_piece) {
    const int64_t rows = std::min(rows_a_piece, m - row);
    scratch_.begin();
    const Tensor sums(scratch_.take<float>(rows * n), DType::f32, {rows, n});
    if (addend) copy(addend.matrix().slice(row, rows), sums);
    matmuls_->run(ta == Transpose::no ? a.slice(row, rows) : a.column_slice(row, rows), ta, b, tb, sums,
                  addend ? sums : Tensor(), scratch_);
    copy(sums, y.slice(row, rows));
  }
}

}  // namespace optimus::cuda
