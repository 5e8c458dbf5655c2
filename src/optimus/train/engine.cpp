#include "optimus/train/engine.h"

#include <numeric>

#include "optimus/ops/dry/dry_ops.h"
#include "optimus/optim/schedule.h"

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
  return (use == EngineUse::train ? config.train.global_batch : config.train.micro_batch) * config.model.sequence;
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

Engine::Engine(const RunConfig& config, EngineUse use, Device& device, std::unique_ptr<Ops> ops,
               const EngineMemory& memory)
    : config_(config),
      device_(device),
      ops_(std::move(ops)),
      world_(make_self_communicator()),
      persistent_(device, "persistent", memory.persistent),
      saved_(device, "saved", memory.saved),
      workspace_(device, "workspace", memory.workspace),
      model_(config.model, table_),
      parameters_(allocate_parameters(table_, config, use, persistent_)) {
  if (use == EngineUse::train) {
    optimizer_ = std::make_unique<Optimizer>(config.optimizer, parameters_, persistent_);
    optimizer_->reset(*ops_);
  }
  const Shape tokens{largest_batch_tokens(config, use)};
  tokens_ = persistent_.allocate(DType::i32, tokens, "batch");
  targets_ = persistent_.allocate(DType::i32, tokens, "batch");
  positions_ = persistent_.allocate(DType::i32, tokens, "batch");
  weights_ = persistent_.allocate(DType::f32, tokens, "batch");
  sums_ = persistent_.allocate(DType::f64, {4}, "control");
  control_ = persistent_.allocate(DType::f32, {kControlSize}, "control");
  if (model_.balance()) {
    const Shape load{config.model.moe_layers(), config.model.moe->experts};
    step_counts_NE_ = persistent_.allocate(DType::f32, load, "control");
    previous_counts_NE_ = persistent_.allocate(DType::f32, load, "control");
    const double uniform =
        double(config.tokens_per_step() * config.model.moe->top_k) / double(config.model.moe->experts);
    ops_->fill(step_counts_NE_, uniform);  // what the first step sees as the previous one
    ops_->fill(previous_counts_NE_, uniform);
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
  if (!master_weights().same_view(parameters_.weights)) ops_->fill(master_weights(), 0.0);
  if (parameters_.gradients) ops_->fill(parameters_.gradients, 0.0);
}

void Engine::initialise(uint64_t seed) {
  const Philox generator = philox_for(seed, "init");
  const Tensor flat = master_weights();
  for (ParameterId id = 0; id < ParameterId(table_.rows().size()); ++id) {
    const Parameter& row = table_[id];
    const Tensor view = table_.view(flat, id);
    if (row.init != Init::normal) {
      ops_->fill(view, row.init == Init::ones ? 1.0 : 0.0);
      continue;
    }
    const int64_t elements_per_row = row.global.elements() / row.global[0];
    int64_t first_row = 0;
    for (const Box& box : row.boxes) {
      const Tensor part = view.slice(first_row, box.size[0]);
      expects(box.size.elements() == box.size[0] * elements_per_row, "initialise: {} is cut across its rows", row.name);
      ops_->fill_normal(part, float(row.init_std), generator, hash_name(row.name), box.begin[0] * elements_per_row);
      if (row.zero_row >= box.begin[0] && row.zero_row < box.begin[0] + box.size[0])
        ops_->fill(part.slice(row.zero_row - box.begin[0], 1), 0.0);
      first_row += box.size[0];
    }
  }
  refresh_weights();
}

Tensor Engine::master_weights() const { return optimizer_ ? optimizer_->master() : parameters_.weights; }

std::vector<FlatState> Engine::moments() const {
  return {{"m.", optimizer_->first_moment()}, {"v.", optimizer_->second_moment()}};
}

Tensor Engine::carried_counts() const {
  return model_.balance() && config_.model.moe->balance_unit == "global" ? step_counts_NE_ : Tensor{};
}

void Engine::refresh_weights() {
  if (!master_weights().same_view(parameters_.weights)) ops_->copy(master_weights(), parameters_.weights);
}

Context Engine::context(Write write) {
  return {*ops_, saved_, workspace_, parameters_, config_.compute_dtype(), write};
}

MicroBatch Engine::upload(const HostBatch& batch) {
  const int64_t tokens = batch.sequences * batch.sequence_length;
  expects(tokens <= tokens_.elements(), "batch of {} tokens, planned for {}", tokens, tokens_.elements());
  MicroBatch whole{batch.sequences,           batch.sequence_length,     tokens_.slice(0, tokens),
                   targets_.slice(0, tokens), weights_.slice(0, tokens), positions_.slice(0, tokens)};
  device_.from_host(whole.tokens_T, batch.tokens.data());
  device_.from_host(whole.targets_T, batch.targets.data());
  device_.from_host(whole.positions_T, batch.positions.data());
  device_.from_host(whole.weights_T, batch.weights.data());
  scales_.target_weight = std::accumulate(batch.weights.begin(), batch.weights.end(), 0.0);
  scales_.tokens = double(tokens);
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

bool Engine::weights_finite_wait() {
  const Tensor squares = sums_.slice(3, 1);  // free between steps
  double sum = 0;
  ops_->fill(squares, 0.0);
  ops_->sum_squares(master_weights(), squares);
  device_.to_host_wait(&sum, squares);
  return std::isfinite(sum);
}

void Engine::forget_step() {
  if (step_counts_NE_) ops_->copy(previous_counts_NE_, step_counts_NE_);
}

void Engine::begin_sums() {
  ops_->fill(sums_, 0.0);
  if (!step_counts_NE_) return;
  ops_->copy(step_counts_NE_, previous_counts_NE_);
  ops_->fill(step_counts_NE_, 0.0);
}

void Engine::step(int64_t step, const HostBatch& batch) {
  const MicroBatch whole = upload(batch);
  const int64_t size = config_.train.micro_batch, count = batch.sequences / size;
  if (model_.balance()) scales_.units = model_.balance()->units_in(batch.sequences, count);
  begin_sums();
  for (int64_t m = 0; m < count; ++m) {
    saved_.reset();
    Context c = context(m == 0 ? Write::overwrite : Write::accumulate);
    const MicroBatch part = micro_batch(whole, m * size, size);
    ModelSaved saved;
    model_.forward(c, part, scales_, loss_sums(), router_load(), saved);
    model_.backward(c, part, scales_, saved);
  }

  const OptimizerConfig& optimizer = config_.optimizer;
  const double updates = double(step + 1);
  const float host_control[kControlSize] = {float(learning_rate(optimizer, step)),
                                            float(1.0 - std::pow(optimizer.beta1, updates)),
                                            float(1.0 - std::pow(optimizer.beta2, updates))};
  const bool clip = !optimizer.clip_after_warmup || step >= *optimizer.warmup_steps;
  const Tensor squares = sums_.slice(3, 1);
  device_.from_host(control_, host_control);
  optimizer_->add_squares(*ops_, squares);
  world_->all_reduce(sums_);
  ops_->clip_control(squares, loss_sums().cross_entropy, clip ? float(optimizer.clip_norm) : 0.0f, control_);
  optimizer_->update(*ops_, control_);
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
  if (model_.balance()) {
    const MoeConfig& moe = *config_.model.moe;
    if (moe.balance == "loss") result.loss += moe.balance_coef * result.balance_loss;
    result.loss += moe.z_loss_coef * result.z_loss;
    std::vector<float> counts = read_floats_wait(device_, step_counts_NE_);
    for (auto begin = counts.begin(); begin != counts.end(); begin += moe.experts)
      result.expert_counts.emplace_back(begin, begin + moe.experts);
  }
  result.gradient_norm = double(control[kGradientNorm]);
  result.finite = control[kFinite] != 0.0f;
  return result;
}

StepResult Engine::gradients_wait(const HostBatch& batch) {
  const MicroBatch whole = upload(batch);
  if (model_.balance()) scales_.units = model_.balance()->units_in(batch.sequences, 1);
  begin_sums();
  ops_->fill(control_, 0.0);
  saved_.reset();
  Context c = context(Write::overwrite);
  ModelSaved saved;
  model_.forward(c, whole, scales_, loss_sums(), router_load(), saved);
  model_.backward(c, whole, scales_, saved);
  return result_wait();
}

StepResult Engine::evaluate_wait(const HostBatch& batch, const LogitsSink& sink) {
  const MicroBatch whole = upload(batch);
  if (model_.balance()) scales_.units = model_.balance()->units_in(batch.sequences, 1);
  ops_->fill(sums_, 0.0);
  saved_.reset();
  Context c = context(Write::overwrite);
  model_.infer(c, whole, scales_, loss_sums(), {{}, step_counts_NE_}, sink);
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
  saved_.reset();
  Context c = context(Write::overwrite);
  std::vector<float> last;
  model_.infer(
      c, batch, scales_, loss_sums(), router_load(),
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
  for (const Arena* arena : {&persistent_, &saved_, &workspace_})
    for (const auto& [name, bytes] : arena->peak_segments())
      if (bytes > 0) segments[(arena == &saved_ ? "saved: " : "") + name] += bytes;
  return segments;
}

EnginePlan plan_engine(const RunConfig& config, EngineUse use) {
  const auto device = make_dry_device(DeviceKind::cpu);
  auto owned = std::make_unique<DryOps>();
  DryOps& ops = *owned;
  Engine engine(config, use, *device, std::move(owned), {});
  ops.clear();

  HostBatch batch;  // a shape only: a dry device reads nothing
  batch.sequence_length = config.model.sequence;
  EnginePlan plan;
  if (use == EngineUse::train) {
    // Micro-batches after the first are alike, so two stand for any number.
    const int64_t count = std::min<int64_t>(2, config.micro_batches());
    batch.sequences = count * config.train.micro_batch;
    engine.step(0, batch);
    plan.step_flops = ops.total_flops() / double(count) * double(config.micro_batches());
  }
  batch.sequences = config.train.micro_batch;
  if (use == EngineUse::gradients) engine.gradients_wait(batch);
  if (use == EngineUse::generation) engine.decode_wait(std::vector<int32_t>(size_t(config.model.sequence)));
  else engine.evaluate_wait(batch);
  plan.memory = engine.peak_memory();
  plan.segments = engine.peak_segments();
  return plan;
}

void check_fits(const EnginePlan& plan, const Device& device) {
  if (device.capacity() > 0 && plan.memory.total() > device.capacity()) {
    std::vector<std::pair<int64_t, std::string>> largest;
    for (const auto& [name, bytes] : plan.segments) largest.emplace_back(bytes, name);
    std::sort(largest.rbegin(), largest.rend());
    std::string names;
    for (size_t i = 0; i < std::min<size_t>(3, largest.size()); ++i)
      names += fmt::format("{}{} {:.1f} GiB", i ? ", " : "", largest[i].second, double(largest[i].first) / 0x1p30);
    fail(
        ErrorKind::kMemory,
        "the run needs {:.1f} GiB, the device has {:.1f}; the largest segments are: {}. A smaller train.micro_batch or "
        "model.sequence needs less",
        double(plan.memory.total()) / 0x1p30, double(device.capacity()) / 0x1p30, names);
  }
}

std::unique_ptr<Engine> make_engine(const RunConfig& config, EngineUse use, Device& device, const EnginePlan& plan) {
  check_fits(plan, device);
  return std::make_unique<Engine>(config, use, device, make_cpu_ops(), plan.memory);
}

}  // namespace optimus
