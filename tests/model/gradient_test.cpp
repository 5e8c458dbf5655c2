// The whole model's f32 gradients against central differences of its own forward pass in double, routing held fixed.
#include <numeric>

#include "optimus/model/stage.h"
#include "optimus/parallel/dispatchers.h"
#include "support/reference_ops.h"
#include "support/tiny_model.h"

namespace optimus::test {
namespace {

// The model in double over the reference kernels, with weights that can be moved.
class DoubleModel {
 public:
  DoubleModel(const RunConfig& config, const std::vector<float>& weights, const HostBatch& batch)
      : config_(config),
        device_(make_cpu_device()),
        arena_(*device_, "double", int64_t(1) << 26),
        workspace_(*device_, "workspace", int64_t(1) << 26),
        model_(config.model, Placement::whole(config.model), 1, table_),
        dispatcher_(make_local_dispatcher()) {
    table_.lay_out(1, 1);
    parameters_ = {&table_, arena_.allocate(DType::f64, {table_.elements()}, "weights"), {}};
    ReferenceOps::put(parameters_.weights, Values(weights.begin(), weights.end()));
    const Shape tokens{batch.sequences * batch.sequence_length};
    batch_ = {batch.sequences,
              batch.sequence_length,
              arena_.allocate(DType::i32, tokens, "batch"),
              arena_.allocate(DType::i32, tokens, "batch"),
              arena_.allocate(DType::f32, tokens, "batch"),
              arena_.allocate(DType::i32, tokens, "batch")};
    device_->from_host(batch_.tokens_T, batch.tokens.data());
    device_->from_host(batch_.targets_T, batch.targets.data());
    device_->from_host(batch_.weights_T, batch.weights.data());
    device_->from_host(batch_.positions_T, batch.positions.data());
    sums_ = arena_.allocate(DType::f64, {3}, "sums");
    if (config.model.moe)
      counts_ = arena_.allocate(DType::f32, {config.model.moe_layers(), config.model.moe->experts}, "counts");
    scales_.target_weight = std::accumulate(batch.weights.begin(), batch.weights.end(), 0.0);
    scales_.tokens = double(tokens[0]);
    if (model_.balance()) scales_.units = model_.balance()->units_in(batch.sequences, 1);
    loss();  // records the routing
  }

  const ParameterTable& table() const { return table_; }

  double loss() {
    Arena::Scope scope(arena_);
    ops_.fill(sums_, 0);
    if (counts_) ops_.fill(counts_, double(batch_.tokens()) * 0.4);
    Context c{ops_, arena_, workspace_, workspace_, parameters_, *dispatcher_, DType::f64, Write::overwrite};
    StageSaved saved;
    model_.begin(c, batch_, saved);
    model_.infer(c, batch_, {scales_, {sums_.slice(0, 1), sums_.slice(1, 1), sums_.slice(2, 1)}, {counts_, counts_}},
                 {}, saved);
    const Values sums = ReferenceOps::get(sums_);
    double loss = sums[0] / scales_.target_weight;
    if (config_.model.moe) {
      if (config_.model.moe->balance == "loss") loss += config_.model.moe->balance_coef * sums[1];
      loss += config_.model.moe->z_loss_coef * sums[2] / scales_.tokens;
    }
    return loss;
  }

  /// d loss / d step along `direction` from the parameter's first element on.
  double derivative(int64_t offset, const Values& direction) {
    constexpr double kStep = 1e-3;
    double at[2];
    for (int side : {0, 1}) {
      move(offset, direction, side ? kStep : -kStep);
      ops_.hold_routing(true);
      at[side] = loss();
      move(offset, direction, side ? -kStep : kStep);
    }
    return (at[1] - at[0]) / (2 * kStep);
  }

 private:
  void move(int64_t offset, const Values& direction, double step) {
    auto* weights = static_cast<double*>(parameters_.weights.data) + offset;
    for (size_t i = 0; i < direction.size(); ++i) weights[i] += step * direction[i];
  }

  RunConfig config_;
  std::unique_ptr<Device> device_;
  Arena arena_, workspace_;
  ParameterTable table_;
  Stage model_;
  std::unique_ptr<TokenDispatcher> dispatcher_;
  ReferenceOps ops_;
  ParameterBuffers parameters_;
  MicroBatch batch_;
  Tensor sums_, counts_;
  LossScales scales_;
};

// Every parameter: along its own gradient (the largest slope) and along a random direction.
void check_gradients(const std::vector<std::string>& overrides) {
  RunConfig config = config_of(kTinyMoe, overrides);
  config.train.micro_batch = config.train.global_batch;
  TestRun run(config, EngineUse::gradients);
  // Weights away from the initial state: norms off one, scores far enough apart to be decided.
  std::vector<float> weights = run.weights();
  const Values noise = normal_values(int64_t(weights.size()), 3);
  const ParameterTable& table = run.engine->table();
  for (const Parameter& row : table.rows())
    for (int64_t i = row.offset; i < row.offset + row.local.elements(); ++i)
      weights[size_t(i)] = row.matrix() ? 5 * weights[size_t(i)] : weights[size_t(i)] + 0.2f * float(noise[size_t(i)]);
  run.device->from_host(run.engine->weights(), weights.data());

  const HostBatch batch = random_batch(config, 7);
  const double loss = run.engine->gradients_wait(batch).loss;
  const std::vector<float> gradients = run.gradients();
  DoubleModel reference(config, weights, batch);
  EXPECT_NEAR(loss, reference.loss(), 1e-5);

  for (const Parameter& row : table.rows()) {
    const int64_t n = row.local.elements();
    const Values gradient(gradients.begin() + row.offset, gradients.begin() + row.offset + n);
    const double norm = std::sqrt(reference::dot(gradient, gradient));
    EXPECT_GT(norm, 0) << row.name << " has no gradient at all";
    Values along = gradient;
    for (double& value : along) value /= norm;
    EXPECT_NEAR(reference.derivative(row.offset, along), norm, 1e-3 * norm) << row.name;
    Values random = normal_values(n, uint64_t(row.offset));
    const double length = std::sqrt(reference::dot(random, random));
    for (double& value : random) value /= length;
    EXPECT_NEAR(reference.derivative(row.offset, random), reference::dot(random, gradient), 1e-3 * norm) << row.name;
  }
}

TEST(ModelGradient, MixtureOfExperts) { check_gradients({}); }
TEST(ModelGradient, BalanceOverTheWholeModel) {
  check_gradients({"model.moe.balance_scope=model", "model.moe.balance_unit=micro_batch",
                   "model.moe.balance_divide_by_k=true", "model.moe.normalize_top_k=true"});
}
TEST(ModelGradient, SigmoidGroupsSharedExperts) {
  check_gradients({"model.moe.score=sigmoid", "model.moe.experts=6", "model.moe.groups=3", "model.moe.top_groups=2",
                   "model.moe.score_scale=2.5", "model.moe.normalize_top_k=true", "model.moe.shared_experts=2"});
}
TEST(ModelGradient, PostNormTiedPerHeadNorm) {
  check_gradients({"model.norm_position=post", "model.tie_embeddings=true", "model.qk_norm=head"});
}
TEST(ModelGradient, LayerNormWithBias) { check_gradients({"model.norm=layer", "model.qk_norm=none"}); }
TEST(ModelGradient, NonparametricPostNormSharedExperts) {
  check_gradients({"model.norm=layer_nonparametric", "model.norm_position=post", "model.moe.shared_experts=1",
                   "model.moe.shared_width=20"});
}

}  // namespace
}  // namespace optimus::test
