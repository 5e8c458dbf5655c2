#include "optimus/model/model.h"

namespace optimus {
namespace {

std::vector<Block> make_blocks(const ModelConfig& config, ParameterTable& table) {
  std::vector<Block> blocks;
  for (int64_t layer = 0; layer < config.layers; ++layer) blocks.emplace_back(config, table, layer);
  return blocks;
}

}  // namespace

Block::Block(const ModelConfig& model, ParameterTable& table, int64_t layer) : attention(model, table, layer) {
  if (model.moe_layer(layer)) moe.emplace(model, table, layer);
  else mlp.emplace(model, table, layer);
}

Model::Model(const ModelConfig& config, ParameterTable& table)
    : config_(config),
      embedding_(config, table),
      blocks_(make_blocks(config, table)),
      head_(config, table, config.tie_embeddings ? embedding_.weight() : -1) {
  if (config.moe_layers() > 0) balance_.emplace(*config.moe, config.moe_layers());
}

void Model::block_forward(Context& c, const MicroBatch& batch, int64_t layer, Tensor x_TD, Tensor middle_TD,
                          Tensor y_TD, const LossSums& sums, const BalanceSaved& balance, BlockSaved& saved,
                          KvCache* cache) const {
  const Block& block = blocks_[size_t(layer)];
  block.attention.forward(c, batch, x_TD, middle_TD, saved.attention, cache);
  if (block.mlp) {
    block.mlp->forward(c, middle_TD, y_TD, saved.mlp);
  } else {
    const int64_t n = layer - config_.moe->first_dense_layers;
    block.moe->forward(c, middle_TD, y_TD, balance_->tokens_per_unit(batch), balance.counts_NUE[n],
                       balance.prob_sums_NUE[n], sums, saved.moe);
  }
}

void Model::forward(Context& c, const MicroBatch& batch, const LossScales& scales, const LossSums& sums,
                    const RouterLoad& load, ModelSaved& saved) const {
  const Shape stream{batch.tokens(), config_.hidden};
  saved.blocks.assign(blocks_.size(), {});
  saved.dx_TD = c.save(c.dtype, stream, "residual");
  if (balance_) balance_->begin(c, batch, saved.balance);

  Tensor x_TD = c.save(c.dtype, stream, "residual");
  embedding_.forward(c, batch.tokens_T, x_TD);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    const Tensor middle_TD = c.save(c.dtype, stream, "residual");
    const Tensor y_TD = c.save(c.dtype, stream, "residual");
    block_forward(c, batch, layer, x_TD, middle_TD, y_TD, sums, saved.balance, saved.blocks[size_t(layer)], nullptr);
    x_TD = y_TD;
  }
  if (balance_) balance_->finish(c, batch, scales, sums, load.previous_counts_NE, load.step_counts_NE, saved.balance);
  head_.forward_backward(c, batch, x_TD, scales, sums, saved.dx_TD);
}

void Model::backward(Context& c, const MicroBatch& batch, const LossScales& scales, ModelSaved& saved) const {
  Arena::Scope scope(c.workspace);
  Tensor dy_TD = saved.dx_TD;
  Tensor dx_TD = c.temporary(c.dtype, dy_TD.shape);
  for (int64_t layer = config_.layers - 1; layer >= 0; --layer) {
    const Block& block = blocks_[size_t(layer)];
    const BlockSaved& kept = saved.blocks[size_t(layer)];
    {
      Arena::Scope layer_scope(c.workspace);
      if (block.mlp) {
        MlpDeferred deferred;
        block.mlp->backward_input(c, dy_TD, dx_TD, kept.mlp, deferred);
        block.mlp->backward_weight(c, kept.mlp, deferred);
      } else {
        MoeDeferred deferred;
        const int64_t n = layer - config_.moe->first_dense_layers;
        block.moe->backward_input(c, dy_TD, dx_TD, balance_->tokens_per_unit(batch), saved.balance.gradient_NUE[n],
                                  scales, kept.moe, deferred);
        block.moe->backward_weight(c, kept.moe, deferred);
      }
    }
    std::swap(dy_TD, dx_TD);
    {
      Arena::Scope layer_scope(c.workspace);
      AttentionDeferred deferred;
      block.attention.backward_input(c, batch, dy_TD, dx_TD, kept.attention, deferred);
      block.attention.backward_weight(c, kept.attention, deferred);
    }
    std::swap(dy_TD, dx_TD);
  }
  embedding_.backward_weight(c, batch.tokens_T, dy_TD);
}

void Model::infer(Context& c, const MicroBatch& batch, const LossScales& scales, const LossSums& sums,
                  const RouterLoad& load, const LogitsSink& sink, std::vector<KvCache>* caches) const {
  Arena::Scope scope(c.saved);
  const Shape stream{batch.tokens(), config_.hidden};
  Tensor x_TD = c.save(c.dtype, stream, "residual");
  Tensor y_TD = c.save(c.dtype, stream, "residual");
  BalanceSaved balance;
  if (balance_) balance_->begin(c, batch, balance);
  embedding_.forward(c, batch.tokens_T, x_TD);
  for (int64_t layer = 0; layer < config_.layers; ++layer) {
    Arena::Scope layer_scope(c.saved);
    const Tensor middle_TD = c.save(c.dtype, stream, "residual");
    BlockSaved saved;
    block_forward(c, batch, layer, x_TD, middle_TD, y_TD, sums, balance, saved,
                  caches ? &(*caches)[size_t(layer)] : nullptr);
    std::swap(x_TD, y_TD);
  }
  if (balance_ && batch.targets_T) balance_->finish(c, batch, scales, sums, load.previous_counts_NE, {}, balance);
  head_.forward(c, batch, x_TD, sums, sink);
}

}  // namespace optimus
