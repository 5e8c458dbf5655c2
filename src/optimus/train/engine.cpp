#include "optimus/train/engine.h"

#include <numeric>

#include "optimus/optim/schedule.h"
#include "optimus/parallel/dispatchers.h"
#include "optimus/parallel/placements.h"

namespace optimus {
namespace {

ParameterBuffers allocate_parameters(const ParameterTable& table, const RunConfig& config, EngineUse use,
                                     Arena& persistent) {
  ParameterBuffers buffers;
  buffers.table = &table;
  const Shape flat{table.elements()};
  buffers.weights = persistent.allocate(config.compute_dtype(), flat, "weights");
  if (use == EngineUse::train || use == EngineUse::gradients)
    buffers.gradients = persistent.allocate(config.gradient_dtype(), flat, "gradients");
  return buffers;
}

int64_t largest_batch_tokens(const RunConfig& config, EngineUse use) {
  if (use == EngineUse::generation) return config.model.sequence;
  return (use == EngineUse::train ? config.local_batch() : config.train.micro_batch) * config.model.sequence;
}

}  // namespace

std::vector<float> read_floats_wait(Device& device, Tensor tensor) {
  std::vector<float> values(size_t(tensor.elements()));
  if (tensor.dtype == DType::f32) {
    device.to_host_wait(values.data(), tensor);
    return values;
  }
  expects(tensor.dtype == DType::bf16, "read_floats_wait of {}", name_of(tensor.dtype));
  std::vector<bf16> raw(values.size());
  device.to_host_wait(raw.data(), tensor);
  std::transform(raw.begin(), raw.end(), values.begin(), [](bf16 value) { return float(value); });
  return values;
}

// ---- construction ----

Pipeline Engine::make_pipeline(EngineUse use, int64_t slot_capacity) {
  std::vector<Stage> stages;
  for (const Placement& placement : placements_of(config_.model, config_.parallel, groups_.shape, groups_.place))
    stages.emplace_back(config_.model, placement, config_.memory.moe_rows, table_);
  table_.lay_out(groups_.shape.dp, groups_.shape.edp);
  const ParallelConfig& parallel = config_.parallel;
  const int64_t micro_batches = use == EngineUse::train ? config_.micro_batches() : 1;
  return Pipeline(use == EngineUse::train ? make_schedule(parallel.schedule, groups_.shape.pp,
                                                          int(parallel.virtual_stages), int(micro_batches))
                                          : make_schedule("1f1b", 1, 1, 1),
                  std::move(stages), *groups_.pp, device_, slot_capacity);
}

std::unique_ptr<TokenDispatcher> Engine::make_dispatcher() {
  if (!config_.model.moe) return make_local_dispatcher();
  const std::string name = dispatcher_for(config_.parallel.dispatcher, *config_.model.moe, groups_.shape.ep);
  if (name == "allgather") return make_allgather_dispatcher(*groups_.ep);
  if (name == "alltoall")
    return make_alltoall_dispatcher(*groups_.ep, device_, *config_.model.moe, config_.memory.moe_rows);
  return make_local_dispatcher();
}

Engine::Engine(const RunConfig& config, EngineUse use, Device& device, std::unique_ptr<Ops> ops, Groups groups,
               const EngineMemory& memory)
    : config_(config),
      device_(device),
      ops_(std::move(ops)),
      groups_(std::move(groups)),
      persistent_(device, "persistent", memory.persistent),
      workspace_(device, "workspace", memory.workspace),
      dispatcher_(make_dispatcher()),
      pipeline_(make_pipeline(use, memory.slot)),
      parameters_(allocate_parameters(table_, config, use, persistent_)) {
  if (use == EngineUse::train) {
    optimizer_ = std::make_unique<Optimizer>(config.optimizer, config.model.tie_embeddings, config.moment_dtype(),
                                             philox_for(uint64_t(config.train.seed), "moments"), parameters_, groups_,
                                             *ops_, persistent_);
    optimizer_->reset();
  }
  const Shape tokens{largest_batch_tokens(config, use)};
  tokens_ = persistent_.allocate(DType::i32, tokens, "batch");
  targets_ = persistent_.allocate(DType::i32, tokens, "batch");
  positions_ = persistent_.allocate(DType::i32, tokens, "batch");
  weights_ = persistent_.allocate(DType::f32, tokens, "batch");
  sums_ = persistent_.allocate(DType::f64, {4}, "control");
  control_ = persistent_.allocate(DType::f32, {kControlSize}, "control");
  if (balance()) {
    const Shape load{config.model.moe_layers(), config.model.moe->experts};
    step_counts_ = persistent_.allocate(DType::f32, load, "control");
    previous_counts_ = persistent_.allocate(DType::f32, load, "control");
    const double uniform =
        double(config.tokens_per_step() * config.model.moe->top_k) / double(config.model.moe->experts);
    ops_->fill(step_counts_, uniform);  // what the first step sees as the previous one
    ops_->fill(previous_counts_, uniform);
  }
  if (use == EngineUse::generation) {
    caches_.resize(size_t(config.model.layers));
    for (KvCache& cache : caches_) {
      const Shape shape{config.model.sequence, config.model.kv_width()};
      cache.k = persistent_.allocate(config.compute_dtype(), shape, "key/value cache");
      cache.v = persistent_.allocate(config.compute_dtype(), shape, "key/value cache");
    }
  }
  // Between the parameters the flat buffers have gaps; they must never hold anything but zeros.
  ops_->fill(parameters_.weights, 0.0);
  if (parameters_.gradients) ops_->fill(parameters_.gradients, 0.0);
}

// ---- state ----

void Engine::initialise(uint64_t seed) {
  const Philox generator = philox_for(seed, "init");
  const FlatState master = master_weights();
  for (const FlatRange& held : master.held) {
    for (const RowRange& range : table_.rows_in(held.begin, held.count)) {
      const Parameter& row = table_[range.id];
      const int64_t place = held.offset + range.offset - held.begin;
      if (row.init != Init::normal) {
        write_state(master, place, range.count,
                    [&](Tensor part, int64_t) { ops_->fill(part, row.init == Init::ones ? 1.0 : 0.0); });
        continue;
      }
      // Boxes of whole rows, so what the rank holds is a run of the global tensor's elements.
      const int64_t per_row = row.global.elements() / row.global[0];
      expects(row.boxes.size() == 1 && row.local.elements() == row.local[0] * per_row,
              "initialise: {} is cut across its rows", row.name);
      const auto draw = [&](Tensor part, int64_t at) {
        const int64_t first = row.boxes[0].begin[0] * per_row + range.first + at - place, count = part.elements();
        ops_->fill_normal(part, float(row.init_std), generator, hash_name(row.name), first);
        if (row.zero_row < 0) return;
        const int64_t begin = std::clamp(row.zero_row * per_row - first, int64_t(0), count);
        const int64_t end = std::clamp((row.zero_row + 1) * per_row - first, int64_t(0), count);
        if (begin < end) ops_->fill(part.slice(begin, end - begin), 0.0);
      };
      write_state(master, place, range.count, draw);
    }
  }
  refresh_weights();
}

FlatState Engine::master_weights() const {
  if (optimizer_) return optimizer_->master();
  const FlatRange all{0, table_.elements(), 0};
  return {"", parameters_.weights.dtype, parameters_.weights, {all}, {all}};
}

void Engine::write_state(const FlatState& state, int64_t first, int64_t count, const Optimizer::Piece& write) {
  if (state.dtype == state.buffer.dtype) write(state.buffer.slice(first, count), first);
  else optimizer_->write_master(first, count, write);
}

void Engine::read_state(const FlatState& state, int64_t first, int64_t count, const Optimizer::Piece& read) {
  if (state.dtype == state.buffer.dtype) read(state.buffer.slice(first, count), first);
  else optimizer_->read_master(first, count, read);
}

std::vector<FlatState> Engine::moments() const { return optimizer_->moments(); }

Tensor Engine::carried_counts() const {
  return balance() && config_.model.moe->balance_unit == "global" ? step_counts_ : Tensor{};
}

void Engine::refresh_weights() {
  if (optimizer_) optimizer_->refresh_weights();
}

bool Engine::weights_finite_wait() {
  const Tensor squares = sums_.slice(3, 1);  // free between steps
  const FlatState master = master_weights();
  double sum = 0;
  ops_->fill(squares, 0.0);
  for (const FlatRange& owned : master.owned)
    ops_->sum_squares(master.buffer.slice(owned.offset, owned.count), squares);
  groups_.world->all_reduce(squares);
  device_.to_host_wait(&sum, squares);
  return std::isfinite(sum);
}

void Engine::forget_step() {
  if (step_counts_) ops_->copy(previous_counts_, step_counts_);
}

// ---- batches and sums ----

Context Engine::context(Arena& saved, Arena* deferred, int micro_batch) {
  return {*ops_,
          saved,
          deferred ? *deferred : workspace_,
          workspace_,
          parameters_,
          *dispatcher_,
          config_.compute_dtype(),
          micro_batch == 0 ? Write::overwrite : Write::accumulate,
          micro_batch == micro_batches_ - 1,
          training_ ? this : nullptr,
          further_waves};
}

Pipeline::MakeContext Engine::contexts() {
  return [this](Arena& saved, Arena* deferred, int micro_batch) { return context(saved, deferred, micro_batch); };
}

MicroBatch Engine::upload(const HostBatch& batch, int64_t micro_batches) {
  const int64_t tokens = batch.sequences * batch.sequence_length;
  expects(tokens <= tokens_.elements(), "batch of {} tokens, planned for {}", tokens, tokens_.elements());
  MicroBatch whole{batch.sequences,           batch.sequence_length,     tokens_.slice(0, tokens),
                   targets_.slice(0, tokens), weights_.slice(0, tokens), positions_.slice(0, tokens)};
  device_.from_host(whole.tokens_T, batch.tokens.data());
  device_.from_host(whole.targets_T, batch.targets.data());
  device_.from_host(whole.positions_T, batch.positions.data());
  device_.from_host(whole.weights_T, batch.weights.data());
  micro_batches_ = int(micro_batches);

  double weight = std::accumulate(batch.weights.begin(), batch.weights.end(), 0.0);
  if (groups_.dp->size() > 1) {
    // Over all ranks, of which pp have the same batch: behind the dp group's transfers it would wait for the last update's
    // weights, which are still on their way.
    const Tensor sum = sums_.slice(0, 1);
    device_.from_host(sum, &weight);
    groups_.world->all_reduce(sum);
    device_.to_host_wait(&weight, sum);
    weight /= double(groups_.shape.pp);
  }
  const int64_t replicas = groups_.dp->size();
  scales_.target_weight = weight;
  scales_.tokens = double(tokens * replicas);
  if (balance()) scales_.units = balance()->units_in(batch.sequences * replicas, micro_batches * replicas);
  return whole;
}

MicroBatch Engine::micro_batch(const MicroBatch& whole, int64_t first_sequence, int64_t sequences) const {
  const int64_t first = first_sequence * whole.sequence_length, tokens = sequences * whole.sequence_length;
  return {sequences,
          whole.sequence_length,
          whole.tokens_T.slice(first, tokens),
          whole.targets_T.slice(first, tokens),
          whole.weights_T.slice(first, tokens),
          whole.positions_T.slice(first, tokens)};
}

void Engine::begin_sums() {
  ops_->fill(sums_, 0.0);
  if (!step_counts_) return;
  ops_->copy(step_counts_, previous_counts_);
  ops_->fill(step_counts_, 0.0);
}

void Engine::reduce_sums() {
  groups_.world->all_reduce(sums_);
  if (step_counts_) groups_.world->all_reduce(step_counts_);
}

// ---- training ----

void Engine::weights_needed(int64_t layer) { optimizer_->weights_needed(layer); }
void Engine::gradients_ready(int64_t layer) { optimizer_->gradients_ready(layer); }
void Engine::layer_begins(int64_t layer) {
  layer_ = layer;
  name_timeline();
  optimizer_->progress();
  pipeline_.progress();
}

void Engine::step(int64_t step, const HostBatch& batch) {
  try {
    forward_backward(batch);
    update(step);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kCommunication) throw;
    fail(error.kind(), "step {}, {}: {}", step + 1, position(), error.what());
  }
}

// "forward m2 layer 5" until the next layer; "forward m2" is what comes before the first.
void Engine::name_timeline() {
  if (!action_) return;
  char name[64];
  const auto end = layer_ < 0
                       ? fmt::format_to_n(name, sizeof name, "{} m{}", name_of(action_->kind), action_->micro_batch)
                       : fmt::format_to_n(name, sizeof name, "{} m{} layer {}", name_of(action_->kind),
                                          action_->micro_batch, layer_);
  device_.timeline({name, size_t(end.out - name)});
}

std::string Engine::position() const {
  if (!action_) return "reduction and update";
  return fmt::format("{} of micro-batch {}, layer {}", name_of(action_->kind), action_->micro_batch, layer_);
}

void Engine::forward_backward(const HostBatch& batch) {
  const int64_t size = config_.train.micro_batch;
  const MicroBatch whole = upload(batch, batch.sequences / size);
  begin_sums();
  training_ = true;
  pipeline_.on_action = [this](const Action& action) {
    action_ = action;
    layer_ = -1;
    name_timeline();
    if (on_action) on_action(&action);
  };
  pipeline_.run(contexts(), [&](int m) { return micro_batch(whole, m * size, size); },
                {scales_, loss_sums(), {step_counts_, previous_counts_}});
  action_.reset();
  training_ = false;
  device_.timeline("update");
  if (on_action) on_action(nullptr);
}

void Engine::update(int64_t step) {
  const OptimizerConfig& optimizer = config_.optimizer;
  const double updates = double(step + 1);
  const float host_control[kControlSize] = {float(learning_rate(optimizer, step)),
                                            float(1.0 - std::pow(optimizer.beta1, updates)),
                                            float(1.0 - std::pow(optimizer.beta2, updates))};
  const bool clip = !optimizer.clip_after_warmup || step >= *optimizer.warmup_steps;
  const Tensor squares = sums_.slice(3, 1);
  device_.from_host(control_, host_control);
  optimizer_->finish_gradients();
  optimizer_->add_squares(squares);
  reduce_sums();
  ops_->clip_control(squares, loss_sums().cross_entropy, clip ? float(optimizer.clip_norm) : 0.0f, control_);
  optimizer_->update(control_, step);
  device_.timeline("");
}

StepResult Engine::result_wait() {
  double sums[4];
  float control[kControlSize];
  device_.to_host_wait(sums, sums_);
  device_.to_host_wait(control, control_);
  StepResult result;
  result.cross_entropy = sums[0] / scales_.target_weight;
  result.balance_loss = sums[1];
  result.z_loss = sums[2] / scales_.tokens;
  result.loss = result.cross_entropy;
  if (balance()) {
    const MoeConfig& moe = *config_.model.moe;
    if (moe.balance == "loss") result.loss += moe.balance_coef * result.balance_loss;
    result.loss += moe.z_loss_coef * result.z_loss;
    std::vector<float> counts = read_floats_wait(device_, step_counts_);
    for (auto begin = counts.begin(); begin != counts.end(); begin += moe.experts)
      result.expert_counts.emplace_back(begin, begin + moe.experts);
  }
  result.gradient_norm = double(control[kGradientNorm]);
  result.finite = control[kFinite] != 0.0f;
  return result;
}

StepResult Engine::gradients_wait(const HostBatch& batch) {
  const MicroBatch whole = upload(batch, 1);
  begin_sums();
  ops_->fill(control_, 0.0);
  pipeline_.run(contexts(), [&](int) { return whole; }, {scales_, loss_sums(), {step_counts_, previous_counts_}});
  return result_wait();
}

// ---- inference ----

StepResult Engine::evaluate_wait(const HostBatch& batch, const LogitsSink& sink) {
  weights_wait();
  const MicroBatch whole = upload(batch, 1);
  ops_->fill(sums_, 0.0);
  pipeline_.infer(contexts(), whole, {scales_, loss_sums(), {{}, step_counts_}}, sink);
  groups_.world->all_reduce(sums_);
  return result_wait();
}

std::vector<float> Engine::decode_wait(const std::vector<int32_t>& tokens) {
  const int64_t T = int64_t(tokens.size()), length = caches_.front().length;
  expects(T >= 1 && length + T <= config_.model.sequence, "decode of {} tokens after {}, capacity {}", T, length,
          config_.model.sequence);
  std::vector<int32_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), int32_t(length));
  MicroBatch batch{1, T, tokens_.slice(0, T), {}, {}, positions_.slice(0, T)};
  device_.from_host(batch.tokens_T, tokens.data());
  device_.from_host(batch.positions_T, positions.data());
  ops_->fill(sums_, 0.0);
  std::vector<float> last;
  pipeline_.infer(
      contexts(), batch, {scales_, loss_sums(), {step_counts_, previous_counts_}},
      [&](int64_t first, Tensor logits) {
        const int64_t row = T - 1 - first;
        if (row < logits.rows()) last = read_floats_wait(device_, logits.slice(row, 1));
      },
      &caches_);
  for (KvCache& cache : caches_) cache.length += T;
  return last;
}

void Engine::reset_caches() {
  for (KvCache& cache : caches_) cache.length = 0;
}

std::map<std::string, int64_t> Engine::peak_segments() const {
  std::map<std::string, int64_t> segments;
  const auto add = [&](const Arena& arena, const std::string& prefix, int64_t times) {
    for (const auto& [name, bytes] : arena.peak_segments())
      if (bytes > 0) segments[prefix + name] += times * bytes;
  };
  add(persistent_, "", 1);
  add(pipeline_.largest_slot(), "saved: ", pipeline_.slots());
  add(workspace_, "", 1);
  if (ops_->fixed_bytes() > 0) segments["kernels' scratch"] = ops_->fixed_bytes();
  return segments;
}

}  // namespace optimus
