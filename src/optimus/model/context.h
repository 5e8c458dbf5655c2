// What a layer needs to run: kernels, memory, parameters. It is passed to every call; layers keep no state of their own
// but the numbers of their parameters.
#pragma once

#include "optimus/model/parameter_table.h"
#include "optimus/model/token_dispatcher.h"
#include "optimus/ops/ops.h"

namespace optimus {

/// The flat buffers behind the parameter table.
struct ParameterBuffers {
  const ParameterTable* table = nullptr;
  Tensor weights;    ///< compute type [elements]
  Tensor gradients;  ///< gradient type [elements]; empty where nothing is trained

  Tensor weight(ParameterId id) const { return table->view(weights, id); }
  Tensor gradient(ParameterId id) const { return table->view(gradients, id); }
};

/// What communication wants to know of a step's course, to overlap with it. Layers are the parameter table's: -1
/// embedding, `layers` final norm and head.
class LayerEvents {
 public:
  virtual ~LayerEvents() = default;
  /// The layer's weights are about to be read.
  virtual void weights_needed(int64_t layer) = 0;
  /// The layer's gradients have their last contribution of the step.
  virtual void gradients_ready(int64_t layer) = 0;
  /// A layer's forward or backward begins. Transports that advance only when called get their turn.
  virtual void layer_begins(int64_t layer) = 0;
};

struct Context {
  Ops& ops;
  Arena& saved;      ///< what forward keeps for backward; one micro-batch
  Arena& deferred;   ///< what backward_input leaves for backward_weight: the workspace where that follows at once, else
                     ///< the micro-batch's own arena
  Arena& workspace;  ///< what a layer needs while it runs
  ParameterBuffers parameters;
  const TokenDispatcher& dispatcher;
  DType dtype;  ///< of weights and activations
  Write write;  ///< gradients of this micro-batch overwrite (the first) or accumulate
  bool last_micro_batch = true;
  LayerEvents* events = nullptr;
  bool further_waves = true;  ///< a dry step takes the waves that only unbalanced experts need, too

  Tensor weight(ParameterId id) const { return id < 0 ? Tensor{} : parameters.weight(id); }
  Tensor gradient(ParameterId id) const { return id < 0 ? Tensor{} : parameters.gradient(id); }
  /// The addend that makes a product obey `write`.
  Tensor gradient_addend(ParameterId id) const {
    return write == Write::accumulate ? parameters.gradient(id) : Tensor{};
  }

  /// The one place where saved tensors come from; `scope` names what they belong to ("attention", "experts", ...).
  Tensor save(DType type, Shape shape, std::string_view scope) { return saved.allocate(type, shape, scope); }
  /// Until backward_weight. Not inside a Scope of the workspace.
  Tensor defer(DType type, Shape shape) { return deferred.allocate(type, shape, "deferred"); }
  Tensor temporary(DType type, Shape shape) { return workspace.allocate(type, shape, "workspace"); }
  bool split_backward() const { return &deferred != &workspace; }

  void weights_needed(int64_t layer) const {
    if (events) events->weights_needed(layer);
  }
  void layer_begins(int64_t layer) const {
    if (events) events->layer_begins(layer);
  }
  void gradients_ready(int64_t layer) const {
    if (events && last_micro_batch) events->gradients_ready(layer);
  }
};

/// One micro-batch on the device; T = sequences * sequence_length tokens.
struct MicroBatch {
  int64_t sequences = 0;
  int64_t sequence_length = 0;
  Tensor tokens_T;     ///< i32
  Tensor targets_T;    ///< i32
  Tensor weights_T;    ///< f32, weight of each target in the loss
  Tensor positions_T;  ///< i32
  int64_t tokens() const { return sequences * sequence_length; }
};

/// Denominators of the losses: sums over the whole global batch, so that no layout and no micro-batch size changes them.
struct LossScales {
  double target_weight = 1;  ///< sum of target weights
  double tokens = 1;         ///< number of tokens
  double units = 1;          ///< number of balance units
};

/// Sums of the step so far, f64 [1] each, on the device.
struct LossSums {
  Tensor cross_entropy;  ///< sum of weight * cross-entropy
  Tensor balance;        ///< mean over units of the balance loss (before its coefficient)
  Tensor z;              ///< sum over layers and tokens of logsumexp(router logits)^2
};

}  // namespace optimus
