#include "optimus/optim/optimizer.h"

namespace optimus {
namespace {

constexpr int64_t kPieceElements = 1 << 20;

/// The rank's piece of a bucket.
FlatRange piece_of(const Bucket& bucket, const Communicator& group) {
  const int64_t size = bucket.count / group.size();
  return {bucket.begin + group.rank() * size, size, 0};
}

FlatRange all_of(const Bucket& bucket) { return {bucket.begin, bucket.count, 0}; }

}  // namespace

Optimizer::Optimizer(const OptimizerConfig& config, bool tied_embeddings, DType moments, const Philox& rounding,
                     const ParameterBuffers& parameters, const Groups& groups, Ops& ops, Arena& persistent)
    : config_(config),
      parameters_(parameters),
      groups_(groups),
      ops_(ops),
      tied_(tied_embeddings && groups.embedding != nullptr),
      moments_(moments),
      rounding_(rounding) {
  int64_t state = 0, largest = 0;
  for (const Bucket& bucket : parameters.table->buckets()) {
    shards_.push_back(make_shard(bucket, state));
    const Communicator& replicas = bucket.cls == ParameterClass::expert ? *groups.edp : *groups.dp;
    if (replicas.size() > 1 && replicas.reduce_needs_scratch()) largest = std::max(largest, bucket.count);
  }
  if (parameters.weights.dtype != DType::f32) {
    remainder_ = persistent.allocate(DType::i16, {state}, "master weights");
    piece_ = persistent.allocate(DType::f32, {std::min(state, kPieceElements)}, "checkpoint buffer");
  }
  m_ = persistent.allocate(moments, {state}, "optimizer moments");
  v_ = persistent.allocate(moments, {state}, "optimizer moments");
  if (largest > 0)
    for (Tensor& scratch : scratch_)
      scratch = persistent.allocate(parameters.gradients.dtype, {largest}, "gradient reduction");
}

Optimizer::Shard Optimizer::make_shard(const Bucket& bucket, int64_t& offset) const {
  const bool expert = bucket.cls == ParameterClass::expert;
  Communicator* replicas = expert ? groups_.edp.get() : groups_.dp.get();
  Shard shard{bucket, {}, piece_of(bucket, *replicas), {}, replicas, replicas, {}, {}};
  if (config_.sharding == "dp") {
    shard.gather = groups_.edp.get();
    shard.reduce = expert || groups_.ep->size() == 1 ? groups_.edp.get() : nullptr;
  }
  if (config_.sharding == "none") shard.gather = nullptr;
  shard.state = shard.gather ? piece_of(bucket, *shard.gather) : all_of(bucket);
  shard.state.offset = offset;
  shard.owned.offset = offset + shard.owned.begin - shard.state.begin;
  shard.runs = runs_in(shard.state);
  offset += shard.state.count;
  return shard;
}

std::vector<Optimizer::Run> Optimizer::runs_in(const FlatRange& state) const {
  std::vector<Run> runs;
  for (const RowRange& range : parameters_.table->rows_in(state.begin, state.count)) {
    const bool decays = config_.decay == "all" || (*parameters_.table)[range.id].matrix();
    const double decay = decays ? config_.weight_decay : 0.0;
    // Gaps between rows hold zeros, which any update leaves zero.
    if (!runs.empty() && runs.back().weight_decay == decay)
      runs.back().count = range.offset + range.count - runs.back().begin;
    else runs.push_back({range.offset, range.count, decay});
  }
  return runs;
}

void Optimizer::reset() {
  for (Tensor state : {remainder_, m_, v_})
    if (state) ops_.fill(state, 0.0);
}

// ---- gradients ----

void Optimizer::gradients_ready(int64_t layer) {
  for (Shard& shard : shards_)
    if (shard.bucket.layer == layer) start_reduction(shard);
}

void Optimizer::progress() {
  for (Shard& shard : shards_)
    for (Pending* transfer : {&shard.reducing, &shard.gathering})
      if (*transfer) (*transfer)->progress();
}

void Optimizer::start_reduction(Shard& shard) {
  if (!shard.reduce || shard.reduce->size() == 1) return;
  // The scratch of the one before last is needed again, where there is one.
  if (Shard* before = in_flight_[next_]; before && scratch_[next_]) finish(before->reducing);
  in_flight_[next_] = &shard;
  shard.reducing = shard.reduce->start_reduce_scatter(
      gradients(all_of(shard.bucket)), gradients(piece_of(shard.bucket, *shard.reduce)), scratch(next_, shard.bucket));
  next_ = (next_ + 1) % kInFlight;
}

void Optimizer::sum_over_ep(const Shard& shard) {
  const Tensor whole = gradients(all_of(shard.bucket));
  for (Communicator* group : {groups_.ep.get(), groups_.edp.get()}) {
    if (group->size() == 1) continue;
    const Tensor part = gradients(piece_of(shard.bucket, *group));
    group->reduce_scatter(whole, part, scratch(0, shard.bucket));
    if (group == groups_.ep.get()) group->all_gather(part, whole);
  }
}

// What other stages take part in waits until all stages are through with their backward.
void Optimizer::complete_reduction(Shard& shard) {
  if (!shard.reduce) sum_over_ep(shard);
  if (tied_ && shard.bucket.layer == -1)
    groups_.embedding->all_reduce(gradients(shard.gather ? shard.state : shard.owned));
  if (!shard.gather && shard.reduce->size() > 1)
    shard.reduce->all_gather(gradients(shard.owned), gradients(all_of(shard.bucket)));
}

void Optimizer::finish_gradients() {
  for (Shard& shard : shards_) finish(shard.reducing);
  for (Shard*& slot : in_flight_) slot = nullptr;
  for (Shard& shard : shards_) complete_reduction(shard);
}

void Optimizer::add_squares(Tensor squares) const {
  for (const Shard& shard : shards_)
    if (!shard.bucket.tied_copy) ops_.sum_squares(gradients(shard.owned), squares);
}

// ---- weights ----

void Optimizer::update(Tensor control, int64_t step) {
  for (Shard& shard : shards_) {
    for (const Run& run : shard.runs) {
      const AdamwConstants constants{float(config_.beta1),
                                     float(config_.beta2),
                                     float(config_.eps),
                                     float(run.weight_decay),
                                     rounding_,
                                     uint64_t(step),
                                     run.begin};
      const FlatRange range{run.begin, run.count, shard.state.offset + run.begin - shard.state.begin};
      const auto state = [&](const Tensor& buffer) { return buffer.slice(range.offset, range.count); };
      ops_.adamw(constants, control, gradients(range), remainder_ ? state(remainder_) : weights(range), state(m_),
                 state(v_), weights(range));
    }
    start_gather(shard);
  }
}

void Optimizer::start_gather(Shard& shard) {
  if (!shard.gather || shard.gather->size() == 1) return;
  shard.gathering = shard.gather->start_all_gather(weights(shard.state), weights(all_of(shard.bucket)));
}

void Optimizer::weights_needed(int64_t layer) {
  for (Shard& shard : shards_)
    if (shard.bucket.layer == layer) finish(shard.gathering);
}

void Optimizer::finish_weights() {
  for (Shard& shard : shards_) finish(shard.gathering);
}

void Optimizer::refresh_weights() {
  for (Shard& shard : shards_) start_gather(shard);
  finish_weights();
}

// ---- state ----

Tensor Optimizer::remainders(int64_t begin, int64_t count) const {
  for (const Shard& shard : shards_)
    if (begin >= shard.state.begin && begin + count <= shard.state.begin + shard.state.count)
      return remainder_.slice(shard.state.offset + begin - shard.state.begin, count);
  expects(false, "master weights [{}, {}) are not held", begin, begin + count);
  return {};
}

void Optimizer::write_master(int64_t begin, int64_t count, const Piece& write) {
  if (!remainder_) return write(parameters_.weights.slice(begin, count), begin);
  for (int64_t first = begin; first < begin + count; first += piece_.elements()) {
    const Tensor values = piece_.slice(0, std::min(piece_.elements(), begin + count - first));
    write(values, first);
    ops_.split_master(values, parameters_.weights.slice(first, values.elements()),
                      remainders(first, values.elements()));
  }
}

void Optimizer::read_master(int64_t begin, int64_t count, const Piece& read) {
  if (!remainder_) return read(parameters_.weights.slice(begin, count), begin);
  for (int64_t first = begin; first < begin + count; first += piece_.elements()) {
    const Tensor values = piece_.slice(0, std::min(piece_.elements(), begin + count - first));
    ops_.join_master(parameters_.weights.slice(first, values.elements()), remainders(first, values.elements()), values);
    read(values, first);
  }
}

FlatState Optimizer::master() const {
  FlatState state{"", DType::f32, parameters_.weights, {}, {}};
  for (const Shard& shard : shards_) {
    const auto placed = [&](FlatRange range) {
      range.offset = range.begin;
      return range;
    };
    state.held.push_back(placed(shard.state));
    if (!shard.bucket.tied_copy) state.owned.push_back(placed(shard.owned));
  }
  return state;
}

std::vector<FlatState> Optimizer::moments() const {
  std::vector<FlatState> states{{"m.", moments_, m_, {}, {}}, {"v.", moments_, v_, {}, {}}};
  for (FlatState& state : states)
    for (const Shard& shard : shards_) {
      state.held.push_back(shard.state);
      if (!shard.bucket.tied_copy) state.owned.push_back(shard.owned);
    }
  return states;
}

}  // namespace optimus
