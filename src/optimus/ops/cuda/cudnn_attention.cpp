// Scaled dot-product attention by cuDNN's graph API.
//
// q, o [B*queries, H*W] and k, v [B*keys, G*W] with any pitch are tensors [B, heads, positions, W] of strides
// (positions*pitch, W, pitch, 1). The library's "stats" [B, H, queries, 1] are max + ln(sum of e^(score - max)), the
// same lse as the portable kernels'. Plans are the first of its heuristics that it supports and whose workspace fits.
//
// A deterministic backward has a large workspace, see limits.h: it runs a chunk of sequences (or of one sequence's
// key/value heads) after the other in the same one. All of that is addressing: strides stay what they are.
#include "optimus/ops/cuda/cudnn_attention.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <map>
#include <unordered_map>

#include "optimus/base/log.h"
#include "optimus/ops/cuda/cudnn_frontend.h"
#include "optimus/ops/cuda/limits.h"

namespace optimus::cuda {
namespace {

namespace fe = cudnn_frontend;

/// Below 9.15.1 the backward pass is wrong, or faults, where keys are no multiple of 128.
constexpr size_t kMendedVersion = 91501;
constexpr int64_t kFaultyKeys = 128;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

/// Names of a graph's tensors.
enum Uid : int64_t { kQ = 1, kK, kV, kO, kLse, kDo, kDq, kDk, kDv };
using Pointers = std::unordered_map<int64_t, void*>;

enum class Pass : int64_t { forward, forward_with_lse, backward };

/// All that a plan depends on.
struct Problem {
  Pass pass;
  AttentionShape shape;
  int64_t q_pitch, k_pitch, v_pitch, o_pitch, do_pitch, dq_pitch, dk_pitch, dv_pitch;

  using Key = std::array<int64_t, 17>;
  Key key() const {
    return {int64_t(pass),  shape.sequences, shape.queries,
            shape.keys,     shape.heads,     shape.kv_heads,
            shape.head_dim, shape.causal,    std::bit_cast<int32_t>(shape.scale),
            q_pitch,        k_pitch,         v_pitch,
            o_pitch,        do_pitch,        dq_pitch,
            dk_pitch,       dv_pitch};
  }
};

/// Without a graph: the library has none for it.
struct Plan {
  std::unique_ptr<fe::graph::Graph> graph;
  int64_t workspace = 0;
  std::string refusal;
};

std::unique_ptr<fe::graph::Graph> graph_of(const Problem& problem, bool deterministic) {
  const AttentionShape& s = problem.shape;
  auto graph = std::make_unique<fe::graph::Graph>();
  graph->set_io_data_type(fe::DataType_t::BFLOAT16)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const auto layout = [&](fe::graph::Tensor_attributes& tensor, Uid uid, int64_t pitch) {
    const bool of_keys = uid == kK || uid == kV || uid == kDk || uid == kDv;
    const int64_t positions = of_keys ? s.keys : s.queries, heads = of_keys ? s.kv_heads : s.heads;
    tensor.set_uid(uid)
        .set_dim({s.sequences, heads, positions, s.head_dim})
        .set_stride({positions * pitch, s.head_dim, pitch, 1});
  };
  const auto lse_layout = [&](fe::graph::Tensor_attributes& tensor) {
    tensor.set_uid(kLse)
        .set_dim({s.sequences, s.heads, s.queries, 1})
        .set_stride({s.heads * s.queries, s.queries, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
  };
  const auto input = [&](Uid uid, int64_t pitch) {
    fe::graph::Tensor_attributes tensor;
    layout(tensor, uid, pitch);
    return graph->tensor(tensor);
  };
  const auto output = [&](const std::shared_ptr<fe::graph::Tensor_attributes>& tensor, Uid uid, int64_t pitch) {
    layout(*tensor, uid, pitch);
    tensor->set_output(true);
  };
  const auto set_options = [&](auto& attributes) {
    attributes.set_name("attention").set_attn_scale(s.scale);
    if (!s.causal) return;
    attributes.set_diagonal_alignment(s.queries == s.keys ? fe::DiagonalAlignment_t::TOP_LEFT
                                                          : fe::DiagonalAlignment_t::BOTTOM_RIGHT);
    attributes.set_diagonal_band_right_bound(0);
  };

  const auto q = input(kQ, problem.q_pitch), k = input(kK, problem.k_pitch), v = input(kV, problem.v_pitch);
  if (problem.pass == Pass::backward) {
    fe::graph::Tensor_attributes lse;
    lse_layout(lse);
    fe::graph::SDPA_backward_attributes attributes;
    set_options(attributes);
    attributes.set_deterministic_algorithm(deterministic);
    const auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, input(kO, problem.o_pitch), input(kDo, problem.do_pitch),
                                                   graph->tensor(lse), attributes);
    output(dq, kDq, problem.dq_pitch);
    output(dk, kDk, problem.dk_pitch);
    output(dv, kDv, problem.dv_pitch);
  } else {
    const bool with_lse = problem.pass == Pass::forward_with_lse;
    fe::graph::SDPA_attributes attributes;
    set_options(attributes);
    attributes.set_generate_stats(with_lse);
    const auto [o, lse] = graph->sdpa(q, k, v, attributes);
    output(o, kO, problem.o_pitch);
    if (with_lse) {
      lse_layout(*lse);
      lse->set_output(true);
    }
  }
  return graph;
}

/// The heuristics' first plan that the library supports with at most `most` bytes for its kernels.
Plan make_plan(const Problem& problem, bool deterministic, cudnnHandle_t handle, int64_t most) {
  Plan plan{graph_of(problem, deterministic), 0, {}};
  const auto steps = [&]() -> fe::error_t {
    fe::graph::Graph& graph = *plan.graph;
    if (auto status = graph.validate(); status.is_bad()) return status;
    if (auto status = graph.build_operation_graph(handle); status.is_bad()) return status;
    if (auto status = graph.create_execution_plans({fe::HeurMode_t::A}); status.is_bad()) return status;
    graph.deselect_workspace_greater_than(most);
    if (auto status = graph.build_plans(); status.is_bad()) return status;
    return graph.get_workspace_size(plan.workspace);
  };
  try {
    if (auto status = steps(); status.is_bad()) plan.refusal = status.get_message();
  } catch (const fe::cudnnException& exception) {
    plan.refusal = exception.what();
  }
  if (!plan.refusal.empty()) plan.graph.reset();
  return plan;
}

void* element(const Tensor& tensor, int64_t row, int64_t column) {
  return tensor.at_row(row) + column * size_of(tensor.dtype);
}

}  // namespace

struct CudnnAttention::State {
  State(CudaDevice& device, bool deterministic)
      : stream(device.stream()), deterministic(deterministic), version(cudnn().cudnnGetVersion()) {}
  ~State() {
    plans.clear();
    if (handle) cudnn().cudnnDestroy(handle);
  }

  /// The plan for a problem, of at most `most` bytes; of a backward pass one that needs more, if there is no other.
  const Plan& plan_for(const Problem& problem, int64_t most) {
    const Problem::Key key = problem.key();
    if (const auto found = plans.find(key); found != plans.end()) return found->second;
    if (!handle) open();
    Plan plan = make_plan(problem, deterministic, handle, most);
    if (!plan.graph && problem.pass == Pass::backward) plan = make_plan(problem, deterministic, handle, kUnlimited);
    if (!plan.graph) {
      const AttentionShape& s = problem.shape;
      log().warn(
          "cuDNN {} has no {} attention of {} queries, {} keys and {} heads ({} of keys) of {}, slower kernels take "
          "its place: {}",
          cudnn_version_text(version), problem.pass == Pass::backward ? "backward" : "forward", s.queries, s.keys,
          s.heads, s.kv_heads, s.head_dim, plan.refusal);
    }
    return plans.emplace(key, std::move(plan)).first->second;
  }

  void open() {
    const cudnnStatus_t status = cudnn().cudnnCreate(&handle);
    require(status == CUDNN_STATUS_SUCCESS,
            status == CUDNN_STATUS_ALLOC_FAILED ? ErrorKind::kMemory : ErrorKind::kUsage,
            "cuDNN {} cannot be used here: {}", cudnn_version_text(version), cudnn().cudnnGetErrorString(status));
    require(cudnn().cudnnSetStream(handle, stream) == CUDNN_STATUS_SUCCESS, ErrorKind::kCommunication,
            "cuDNN refused the device's stream");
  }

  void execute(const Plan& plan, Pointers& pointers, void* workspace) {
    auto status = plan.graph->execute(handle, pointers, workspace);
    require(status.is_good(), ErrorKind::kCommunication, "the GPU failed: cuDNN: {}", status.get_message());
  }

  cudaStream_t stream;
  bool deterministic;
  size_t version;
  cudnnHandle_t handle = nullptr;
  std::map<Problem::Key, Plan> plans;
};

CudnnAttention::CudnnAttention(CudaDevice& device, bool deterministic)
    : state_(std::make_unique<State>(device, deterministic)) {}

CudnnAttention::~CudnnAttention() = default;

bool CudnnAttention::takes(const AttentionShape& shape, std::initializer_list<Tensor> matrices) const {
  if (shape.keys % kFaultyKeys != 0 && state_->version < kMendedVersion) return false;
  return std::all_of(matrices.begin(), matrices.end(), [&](const Tensor& matrix) {
    return attention_by_cudnn(shape, matrix.dtype) && reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 &&
           matrix.pitch % 8 == 0;
  });
}

bool CudnnAttention::forward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                             Scratch& scratch) {
  const Problem problem{
      lse ? Pass::forward_with_lse : Pass::forward, shape, q.pitch, k.pitch, v.pitch, o.pitch, 0, 0, 0, 0};
  const Plan& plan = state_->plan_for(problem, kScratchBytes);
  if (!plan.graph) return false;
  scratch.begin();
  Pointers pointers{{kQ, q.data}, {kK, k.data}, {kV, v.data}, {kO, o.data}};
  if (lse) pointers.emplace(kLse, lse.data);
  state_->execute(plan, pointers, scratch.take<std::byte>(plan.workspace));
  return true;
}

namespace {
// The portable kernels take over: their scratch is always within what was planned.
bool too_large(int64_t workspace, int64_t available) {
  log().warn("cuDNN's attention backward asks for {} bytes of workspace, planned were {}: portable kernels instead",
             workspace, available);
  return false;
}
}  // namespace

bool CudnnAttention::backward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                              Tensor do_, Tensor dq, Tensor dk, Tensor dv, Tensor workspace) {
  const int64_t available = workspace ? workspace.bytes() : 0;
  const int64_t group = shape.heads / shape.kv_heads, width = shape.head_dim;
  const auto plan_for = [&](int64_t sequences, int64_t kv_heads) -> const Plan& {
    Problem problem{Pass::backward, shape, q.pitch, k.pitch, v.pitch, o.pitch, do_.pitch, dq.pitch, dk.pitch, dv.pitch};
    problem.shape.sequences = sequences;
    problem.shape.kv_heads = kv_heads;
    problem.shape.heads = kv_heads * group;
    return state_->plan_for(problem, available);
  };

  // What was planned without a GPU should fit; where this version of the library wants more, smaller chunks do.
  AttentionChunk chunk = attention_chunk(shape, state_->deterministic);
  for (;;) {
    const Plan& plan = plan_for(chunk.sequences, chunk.kv_heads);
    if (!plan.graph) return false;
    if (plan.workspace <= available) break;
    if (chunk.sequences == 1 && chunk.kv_heads == 1) return too_large(plan.workspace, available);
    if (chunk.sequences > 1) chunk.sequences = (chunk.sequences + 1) / 2;
    else chunk.kv_heads = (chunk.kv_heads + 1) / 2;
  }

  for (int64_t sequence = 0; sequence < shape.sequences; sequence += chunk.sequences) {
    for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head += chunk.kv_heads) {
      const Plan& plan = plan_for(std::min(chunk.sequences, shape.sequences - sequence),
                                  std::min(chunk.kv_heads, shape.kv_heads - kv_head));
      if (!plan.graph) return false;
      if (plan.workspace > available) return too_large(plan.workspace, available);
      const int64_t query = sequence * shape.queries, key = sequence * shape.keys, head = kv_head * group;
      Pointers pointers{{kQ, element(q, query, head * width)},
                        {kK, element(k, key, kv_head * width)},
                        {kV, element(v, key, kv_head * width)},
                        {kO, element(o, query, head * width)},
                        {kLse, lse.as<float>() + (sequence * shape.heads + head) * shape.queries},
                        {kDo, element(do_, query, head * width)},
                        {kDq, element(dq, query, head * width)},
                        {kDk, element(dk, key, kv_head * width)},
                        {kDv, element(dv, key, kv_head * width)}};
      state_->execute(plan, pointers, workspace.data);
    }
  }
  return true;
}

}  // namespace optimus::cuda
