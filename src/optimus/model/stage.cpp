#include "optimus/model/stage.h"

namespace optimus {
namespace {

// MoE layers before `layer`.
int64_t moe_layers_before(const ModelConfig& config, int64_t layer) {
  return config.moe ? std::max<int64_t>(0, layer - config.moe->first_dense_layers) : 0;
}

}  // namespace

Placement Placement::whole(const ModelConfig& model) {
  return {0, model.layers, true, true, 0, model.moe ? model.moe->experts : 0};
}

ParameterTable whole_table(const ModelConfig& config) {
  ParameterTable table;
  const Stage assembled(config, Placement::whole(config), 1, table);
  table.lay_out(1, 1);
  return table;
}

// ---- block ----

Block::Block(const ModelConfig& model, const Placement& placement, double moe_rows, ParameterTable& table,
             int64_t layer)
    : moe_index_(moe_layers_before(model, layer) - moe_layers_before(model, placement.first_layer)),
      attention_(model, table, layer) {
  if (model.moe_layer(layer)) moe_.emplace(model, placement, moe_rows, table, layer);
  else mlp_.emplace(model, table, layer);
}

void Block::forward(Context& c, const MicroBatch& batch, const Balance* balance, const BalanceSaved& balance_saved,
                    const LossSums& sums, Tensor x_TD, Tensor middle_TD, Tensor y_TD, BlockSaved& saved,
                    KvCache* cache) const {
  attention_.forward(c, batch, x_TD, middle_TD, saved.attention, cache);
  if (mlp_) mlp_->forward(c, middle_TD, y_TD, saved.mlp);
  else
    moe_->forward(c, middle_TD, y_TD, balance->tokens_per_unit(batch), balance_saved.counts_NUE[moe_index_],
                  balance_saved.prob_sums_NUE[moe_index_], sums, saved.moe);
}

void Block::mlp_backward_input(Context& c, const MicroBatch& batch, const Balance* balance,
                               const BalanceSaved& balance_saved, const LossScales& scales, Tensor dy_TD,
                               Tensor dmiddle_TD, const BlockSaved& saved, BlockDeferred& deferred) const {
  if (mlp_) mlp_->backward_input(c, dy_TD, dmiddle_TD, saved.mlp, deferred.mlp);
  else
    moe_->backward_input(c, dy_TD, dmiddle_TD, balance->tokens_per_unit(batch), balance_saved.gradient(moe_index_),
                         scales, saved.moe, deferred.moe);
}

void Block::mlp_backward_weight(Context& c, const BlockSaved& saved, const BlockDeferred& deferred) const {
  if (mlp_) mlp_->backward_weight(c, saved.mlp, deferred.mlp);
  else moe_->backward_weight(c, saved.moe, deferred.moe);
}

void Block::backward(Context& c, const MicroBatch& batch, const Balance* balance, const BalanceSaved& balance_saved,
                     const LossScales& scales, Tensor dy_TD, Tensor dmiddle_TD, Tensor dx_TD,
                     const BlockSaved& saved) const {
  BlockDeferred deferred;
  {
    Arena::Scope scope(c.workspace);
    mlp_backward_input(c, batch, balance, balance_saved, scales, dy_TD, dmiddle_TD, saved, deferred);
    mlp_backward_weight(c, saved, deferred);
  }
  Arena::Scope scope(c.workspace);
  attention_.backward_input(c, batch, dmiddle_TD, dx_TD, saved.attention, deferred.attention);
  attention_.backward_weight(c, saved.attention, deferred.attention);
}

void Block::backward_input(Context& c, const MicroBatch& batch, const Balance* balance,
                           const BalanceSaved& balance_saved, const LossScales& scales, Tensor dy_TD, Tensor dmiddle_TD,
                           Tensor dx_TD, const BlockSaved& saved, BlockDeferred& deferred) const {
  Arena::Scope scope(c.workspace);
  mlp_backward_input(c, batch, balance, balance_saved, scales, dy_TD, dmiddle_TD, saved, deferred);
  attention_.backward_input(c, batch, dmiddle_TD, dx_TD, saved.attention, deferred.attention);
}

void Block::backward_weight(Context& c, const BlockSaved& saved, const BlockDeferred& deferred) const {
  mlp_backward_weight(c, saved, deferred);
  attention_.backward_weight(c, saved.attention, deferred.attention);
}

// ---- stage ----

Stage::Stage(const ModelConfig& config, const Placement& placement, double moe_rows, ParameterTable& table)
    : config_(config),
      placement_(placement),
      tied_here_(config.tie_embeddings && placement.embedding && placement.head),
      embedding_weight_(-1) {
  if (placement.embedding || (placement.head && config.tie_embeddings))
    embedding_weight_ = add_embedding_weight(config, table, !placement.embedding);
  if (placement.embedding) embedding_.emplace(config, embedding_weight_, tied_here_);
  for (int64_t i = 0; i < placement.layers; ++i)
    blocks_.emplace_back(config, placement, moe_rows, table, placement.first_layer + i);
  if (placement.head) head_.emplace(config, table, config.tie_embeddings ? embedding_weight_ : -1);
  if (config.moe_layers() > 0) {
    const int64_t first = moe_layers_before(config, placement.first_layer);
    const int64_t last = moe_layers_before(config, placement.first_layer + placement.layers);
    balance_.emplace(*config.moe, first, last - first, config.moe_layers());
  }
}

void Stage::begin(Context& c, const MicroBatch& batch, StageSaved& saved) const {
  saved = {};
  const Shape stream{batch.tokens(), config_.hidden};
  const bool balance_crosses = balance_ && balance_->whole_model();
  const int64_t U = balance_ ? balance_->units(batch) : 0, E = balance_ ? config_.moe->experts : 0;
  const auto boundary = [&](int64_t balance_rows) {
    Boundary made{c.save(c.dtype, stream, "residual"), {}};
    if (balance_crosses) made.balance = c.save(DType::f32, balance_rows == 2 ? Shape{2, U, E} : Shape{U, E}, "router");
    return made;
  };
  if (!embedding_) saved.input = boundary(2);
  else saved.input.x_TD = c.save(c.dtype, stream, "residual");
  saved.output = boundary(2);
  saved.output_gradient = boundary(1);
}

void Stage::read_input(Context& c, const MicroBatch& batch, Tensor x_TD) const {
  if (!embedding_) return;
  c.weights_needed(-1);
  embedding_->forward(c, batch.tokens_T, x_TD);
}

void Stage::head_weights_needed(Context& c) const {
  c.weights_needed(config_.layers);
  if (config_.tie_embeddings) c.weights_needed(-1);
}

void Stage::forward(Context& c, const MicroBatch& batch, const LossTerms& terms, StageSaved& saved) const {
  const Shape stream{batch.tokens(), config_.hidden};
  saved.blocks.assign(blocks_.size(), {});
  if (balance_) balance_->begin(c, batch, saved.balance);

  Tensor x_TD = saved.input.x_TD;
  read_input(c, batch, x_TD);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    c.layer_begins(layer(i));
    c.weights_needed(layer(i));
    const Tensor middle_TD = c.save(c.dtype, stream, "residual");
    const Tensor y_TD = i + 1 == blocks_.size() ? saved.output.x_TD : c.save(c.dtype, stream, "residual");
    blocks_[i].forward(c, batch, balance(), saved.balance, terms.sums, x_TD, middle_TD, y_TD, saved.blocks[i], nullptr);
    x_TD = y_TD;
  }
  if (balance_) {
    balance_->finish(c, batch, terms.scales, terms.sums, terms.load.previous_counts, terms.load.step_counts,
                     saved.balance);
    if (balance_->whole_model()) balance_->pass_on(c, saved.balance, saved.input.balance, saved.output.balance);
  }
  if (!head_) return;
  if (balance_ && balance_->whole_model())
    balance_->finish_model(c, batch, terms.scales, terms.sums, terms.load.previous_counts, saved.output.balance,
                           saved.output_gradient.balance);
  head_weights_needed(c);
  head_->forward_backward(c, batch, x_TD, terms.scales, terms.sums, saved.output_gradient.x_TD);
  c.gradients_ready(config_.layers);
  if (config_.tie_embeddings && !embedding_) c.gradients_ready(-1);
}

void Stage::take_balance_gradient(StageSaved& saved) const {
  const Tensor gradient_UE = saved.output_gradient.balance;
  if (gradient_UE) saved.balance.gradient_AUE = gradient_UE.reshape({1, gradient_UE.shape[0], gradient_UE.shape[1]});
}

void Stage::embedding_backward(Context& c, const MicroBatch& batch, Tensor dx_TD) const {
  if (!embedding_) return;
  embedding_->backward_weight(c, batch.tokens_T, dx_TD);
  c.gradients_ready(-1);
}

void Stage::backward(Context& c, const MicroBatch& batch, const LossScales& scales, StageSaved& saved) const {
  take_balance_gradient(saved);
  // The residual's gradient goes back and forth between two buffers; the one that arrived also leaves.
  saved.input_gradient = saved.output_gradient;
  const Tensor dx_TD = saved.input_gradient.x_TD;
  Arena::Scope scope(c.workspace);
  const Tensor dmiddle_TD = c.temporary(c.dtype, dx_TD.shape);
  for (size_t i = blocks_.size(); i-- > 0;) {
    c.layer_begins(layer(i));
    blocks_[i].backward(c, batch, balance(), saved.balance, scales, dx_TD, dmiddle_TD, dx_TD, saved.blocks[i]);
    c.gradients_ready(layer(i));
  }
  embedding_backward(c, batch, dx_TD);
}

void Stage::backward_input(Context& c, const MicroBatch& batch, const LossScales& scales, StageSaved& saved) const {
  take_balance_gradient(saved);
  saved.deferred.assign(blocks_.size(), {});
  saved.input_gradient = saved.output_gradient;
  Tensor& dx_TD = saved.input_gradient.x_TD;
  for (size_t i = blocks_.size(); i-- > 0;) {
    c.layer_begins(layer(i));
    const Tensor dy_TD = dx_TD, dmiddle_TD = c.defer(c.dtype, dy_TD.shape);
    dx_TD = c.defer(c.dtype, dy_TD.shape);
    blocks_[i].backward_input(c, batch, balance(), saved.balance, scales, dy_TD, dmiddle_TD, dx_TD, saved.blocks[i],
                              saved.deferred[i]);
  }
}

void Stage::backward_weight(Context& c, const MicroBatch& batch, StageSaved& saved) const {
  for (size_t i = blocks_.size(); i-- > 0;) {
    c.layer_begins(layer(i));
    blocks_[i].backward_weight(c, saved.blocks[i], saved.deferred[i]);
    c.gradients_ready(layer(i));
  }
  embedding_backward(c, batch, saved.input_gradient.x_TD);
}

void Stage::infer(Context& c, const MicroBatch& batch, const LossTerms& terms, const LogitsSink& sink,
                  StageSaved& saved, KvCache* caches) const {
  const Shape stream{batch.tokens(), config_.hidden};
  saved.blocks.clear();
  if (balance_) balance_->begin(c, batch, saved.balance);
  Tensor x_TD = saved.input.x_TD, y_TD = saved.output.x_TD;
  read_input(c, batch, x_TD);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    c.weights_needed(layer(i));
    Arena::Scope layer_scope(c.saved);
    const Tensor middle_TD = c.save(c.dtype, stream, "residual");
    BlockSaved block;
    blocks_[i].forward(c, batch, balance(), saved.balance, terms.sums, x_TD, middle_TD, y_TD, block,
                       caches ? caches + i : nullptr);
    std::swap(x_TD, y_TD);
  }
  saved.output.x_TD = x_TD;
  if (balance_ && batch.targets_T) {
    balance_->finish(c, batch, terms.scales, terms.sums, terms.load.previous_counts, {}, saved.balance);
    if (balance_->whole_model()) balance_->pass_on(c, saved.balance, saved.input.balance, saved.output.balance);
    if (balance_->whole_model() && head_)
      balance_->finish_model(c, batch, terms.scales, terms.sums, terms.load.previous_counts, saved.output.balance,
                             saved.output_gradient.balance);
  }
  if (!head_) return;
  head_weights_needed(c);
  head_->forward(c, batch, x_TD, terms.sums, sink);
}

}  // namespace optimus
