// AdamW over the flat buffers, its state sharded over the ranks that replicate the weights.
//
// Each bucket of the parameter table (one layer, one class) is replicated over a group: the replicated class over dp, the
// experts over edp (dp = edp * ep). With n elements, on the rank with number i of the dp group, e of ep and d of edp
// (i = d * ep + e):
//
//   sharding    gradients                                   state and update             weights
//   ep_aware    reduce-scatter over the class's group       1/dp or 1/edp of the bucket  all-gather over it
//   dp          replicated: all-reduce over ep; both:       1/edp of the bucket          all-gather over edp
//               reduce-scatter over edp
//   none        reduce-scatter and all-gather (all-reduce)  everything                   nothing
//               over the class's group
//
// ep_aware is EPSO, dp is SO (facts: "Scalable Pretraining of Large Mixture of Experts Language Models on Aurora").
// In all three a rank *owns* the piece that ep_aware would give it: it counts that piece in the global norm and writes
// it into checkpoints, so that every element of the model counts once. Piece i of dp lies in piece d of edp, so a rank
// always has what it owns.
//
// Master weights are f32. Where the weights are bf16 a master is the weight and a 16-bit remainder beside it, see
// Ops::split_master: the flat weights are half of it, and the state holds the remainder. Others see f32 pieces of it.
// Moments may be bf16; their stochastic rounding is keyed by the element's place in the flat buffers and the step.
//
// Communication overlaps with compute: a bucket's reduction starts when its gradients are complete, in the backward of
// the last micro-batch, and its weights are waited for when the next forward reaches the layer.
#pragma once

#include <functional>

#include "optimus/comm/groups.h"
#include "optimus/model/context.h"
#include "optimus/optim/config.h"

namespace optimus {

/// A run of elements of the flat buffers, and where the first one lies in another buffer.
struct FlatRange {
  int64_t begin, count;
  int64_t offset;
};

/// One buffer of optimizer state (or the master weights): what of the model it holds and what of that the rank owns.
struct FlatState {
  std::string prefix;  ///< tensors are named prefix + parameter: "", "m.", "v."
  DType dtype;         ///< of the elements, and of the tensors in checkpoints
  /// Of another type than `dtype` for split masters: then it holds the weights, and only pieces show the whole, see
  /// Optimizer::write_master().
  Tensor buffer;
  std::vector<FlatRange> held, owned;
};

class Optimizer {
 public:
  /// Allocates the state from `persistent`; parameters and groups must outlive the optimizer.
  /// tied_embeddings: the embedding's weight is the head's, too; on two stages its gradients are summed. `rounding` is
  /// the generator for moments in bf16.
  Optimizer(const OptimizerConfig& config, bool tied_embeddings, DType moments, const Philox& rounding,
            const ParameterBuffers& parameters, const Groups& groups, Ops& ops, Arena& persistent);

  /// Moments to zero; the master weights are the caller's to fill.
  void reset();

  // During a step; see LayerEvents.
  void weights_needed(int64_t layer);
  void gradients_ready(int64_t layer);
  /// Lets transfers under way advance; for transports that do so only when called.
  void progress();
  /// After the last backward: all reductions are done.
  void finish_gradients();
  /// Adds the squares of the gradients that the rank owns (f64 [1]).
  void add_squares(Tensor squares) const;
  /// One update of the rank's shards, as `control` says (see ControlSlot); the weights' all-gather begins. `step` counts
  /// from 0.
  void update(Tensor control, int64_t step);

  /// f32 master weights of flat elements [first, first + its length).
  using Piece = std::function<void(Tensor values, int64_t first)>;
  /// Calls write(values, first) for pieces that cover [begin, begin + count), a part of a range held, and keeps what it
  /// put there.
  void write_master(int64_t begin, int64_t count, const Piece& write);
  /// Calls read(values, first) for the same pieces.
  void read_master(int64_t begin, int64_t count, const Piece& read);
  /// After the master weights were written: the compute weights of all ranks follow.
  void refresh_weights();
  /// All weights are there.
  void finish_weights();

  FlatState master() const;
  std::vector<FlatState> moments() const;

 private:
  struct Run {  ///< of flat elements with the same decay
    int64_t begin, count;
    double weight_decay;
  };
  /// What this rank does with a bucket; ranges of the flat buffers, offsets in the state buffers.
  struct Shard {
    Bucket bucket;
    FlatRange state, owned;
    std::vector<Run> runs;  ///< of the state
    Communicator* reduce;   ///< of gradients, started in backward; empty: see sum_over_ep
    Communicator* gather;   ///< of weights; empty with sharding none
    Pending reducing, gathering;
  };

  Shard make_shard(const Bucket& bucket, int64_t& offset) const;
  std::vector<Run> runs_in(const FlatRange& range) const;
  void start_reduction(Shard& shard);
  void complete_reduction(Shard& shard);
  void sum_over_ep(const Shard& shard);
  void start_gather(Shard& shard);
  Tensor gradients(const FlatRange& range) const { return parameters_.gradients.slice(range.begin, range.count); }
  Tensor weights(const FlatRange& range) const { return parameters_.weights.slice(range.begin, range.count); }
  Tensor scratch(int slot, const Bucket& bucket) const {
    return scratch_[slot] ? scratch_[slot].slice(0, bucket.count) : Tensor{};
  }
  /// The remainders of flat elements that are held.
  Tensor remainders(int64_t begin, int64_t count) const;

  OptimizerConfig config_;
  ParameterBuffers parameters_;
  const Groups& groups_;
  Ops& ops_;
  bool tied_;  ///< the embedding's bucket is on the first and on the last stage
  std::vector<Shard> shards_;
  DType moments_;
  Philox rounding_;
  Tensor m_, v_;
  Tensor remainder_;  // i16; empty where the weights themselves are f32
  Tensor piece_;      // f32, for parts of split masters on their way
  static constexpr int kInFlight = 2;
  Tensor scratch_[kInFlight];
  Shard* in_flight_[kInFlight] = {};
  int next_ = 0;
};

}  // namespace optimus
