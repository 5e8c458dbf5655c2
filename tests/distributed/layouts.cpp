#include "distributed/layouts.h"

#include <cstring>
#include <set>

#include "optimus/ops/timed_ops.h"

namespace optimus::test {
namespace {

// Eight layers and eight experts, so that 8 ranks can be stages or hold one expert each.
constexpr const char* kModel = R"(
[model]
layers = 8
hidden = 24
heads = 4
kv_heads = 2
vocab = 40
sequence = 12
mlp_width = 32
qk_norm = "full"
init_std = 0.08
[model.moe]
experts = 8
top_k = 2
width = 12
balance_coef = 0.05
z_loss_coef = 0.01
[train]
global_batch = 8
micro_batch = 1
steps = 10
[optimizer]
eps = 1e-5
)";

/// Watches how far the router's choices are from changing.
class GapOps final : public TimedOps {
 public:
  GapOps(std::unique_ptr<Ops> ops, Device& device, double& smallest)
      : TimedOps(std::move(ops), device), device_(device), smallest_(smallest) {}
  void router(const RouterShape& shape, Tensor logits, Tensor bias, Tensor probs, Tensor gates, Tensor ids,
              Tensor lse) override {
    TimedOps::router(shape, logits, bias, probs, gates, ids, lse);
    const std::vector<float> all = read_floats_wait(device_, probs);
    for (int64_t t = 0; t < probs.rows(); ++t) {
      const auto row = all.begin() + t * probs.columns();
      std::vector<float> sorted(row, row + probs.columns());
      std::sort(sorted.rbegin(), sorted.rend());
      const double last = sorted[size_t(shape.top_k - 1)], next = sorted[size_t(shape.top_k)];
      smallest_ = std::min(smallest_, (last - next) / last);
    }
  }

 private:
  Device& device_;
  double& smallest_;
};

RunConfig config_for(const Variant& variant, std::vector<std::string> more, int64_t ranks) {
  std::vector<std::string> overrides{"run.device=" + test_device(), "precision.compute=f32"};
  overrides.insert(overrides.end(), variant.overrides.begin(), variant.overrides.end());
  overrides.insert(overrides.end(), more.begin(), more.end());
  return parse_config(kModel, "test.toml", overrides, ConfigUse::shape, ranks);
}

// The router's rows to zero: all scores are equal, so every token chooses the first experts, all on one rank.
bool uniform_router(const Variant& variant) { return std::string(variant.name) == "AllTokensToOneRank"; }

void initialise(Engine& engine, Device& device, const Variant& variant) {
  engine.initialise(uint64_t(engine.config().train.seed));
  if (!uniform_router(variant)) return;
  const auto ops = make_ops(engine.config(), device);
  const FlatState master = engine.master_weights();
  for (const FlatRange& held : master.held)
    for (const RowRange& range : engine.table().rows_in(held.begin, held.count))
      if (engine.table()[range.id].name.ends_with("router.weight"))
        engine.write_state(master, held.offset + range.offset - held.begin, range.count,
                           [&](Tensor values, int64_t) { ops->fill(values, 0.0); });
  engine.refresh_weights();
  device.synchronise_wait();  // the ops' own memory goes with them
}

// Uneven weights, so that a rank's mean is not the global one.
HostBatch weighted_batch(const RunConfig& config, int64_t step) {
  HostBatch batch = random_batch(config, 100 + uint64_t(step));
  for (size_t i = 0; i < batch.weights.size(); ++i)
    if (batch.weights[i] != 0) batch.weights[i] = 0.25f * float(1 + (i * 7 + i / 12) % 5);
  return batch;
}

std::map<std::string, std::vector<float>> tensors_of(Device& device, const Engine& engine, const Tensor& flat) {
  std::map<std::string, std::vector<float>> tensors;
  for (size_t id = 0; id < engine.table().rows().size(); ++id)
    tensors[engine.table().rows()[id].name] = read_floats_wait(device, engine.table().view(flat, ParameterId(id)));
  return tensors;
}

// Sums on a GPU go in an order that depends on sizes, over ranks on NCCL's.
double bound() { return on_gpus() ? 1e-4 : 1e-5; }

/// First element of the rank's part of a row in the whole tensor.
int64_t global_begin(const Parameter& row) { return row.boxes[0].begin[0] * (row.global.elements() / row.global[0]); }

/// Sums of squares by parameter, over all ranks.
struct Comparison {
  std::map<std::string, std::pair<double, double>> difference_and_norm;

  void add(const std::string& name, const float* got, const float* expected, int64_t count) {
    auto& [difference, norm] = difference_and_norm[name];
    for (int64_t i = 0; i < count; ++i) {
      const double d = double(got[i]) - double(expected[i]);
      difference += d * d;
      norm += double(expected[i]) * double(expected[i]);
    }
  }
  /// Collective: every rank gets the sums. `names` are those of all parameters, in one order.
  void sum(const std::map<std::string, std::vector<float>>& names, Device& device, Communicator& world) {
    std::vector<double> flat;
    for (const auto& entry : names) {
      flat.push_back(difference_and_norm[entry.first].first);
      flat.push_back(difference_and_norm[entry.first].second);
    }
    const DeviceTensor sums(device, DType::f64, {int64_t(flat.size())});
    device.from_host(*sums, flat.data());
    world.all_reduce(*sums);
    device.to_host_wait(flat.data(), *sums);
    size_t i = 0;
    for (const auto& entry : names) {
      difference_and_norm[entry.first] = {flat[i], flat[i + 1]};
      i += 2;
    }
  }
  void expect_below(double bound, const char* what) const {
    for (const auto& [name, sums] : difference_and_norm)
      EXPECT_LE(std::sqrt(sums.first), bound * std::sqrt(sums.second)) << what << " of " << name;
  }
};

}  // namespace

const std::vector<Variant>& variants() {
  static const std::vector<Variant> all{
      {"Moe", {}},
      // With one layer a stage, and with these two stages, the first one holds no expert.
      {"DenseFirst", {"model.moe.first_dense_layers=1", "memory.moe_rows=1.0"}, 5, "[1,7]"},
      {"TiedModelBalance",
       {"model.tie_embeddings=true", "model.moe.balance_scope=model", "model.moe.shared_experts=1",
        "model.norm_position=post", "optimizer.clip_norm=0.5"},
       5,
       "[5,3]"},
      {"GlobalBalance", {"model.moe.balance_unit=global", "model.moe.balance_scope=model", "optimizer.decay=matrices"}},
      {"AllTokensToOneRank", {"memory.moe_rows=1.0"}, 1},
      {"Dense", {"model.moe.first_dense_layers=8", "model.tie_embeddings=true"}, 5, "[3,5]"},
  };
  return all;
}

const Variant& variant_named(const std::string& name) {
  for (const Variant& variant : variants())
    if (name == variant.name) return variant;
  throw std::logic_error("no variant " + name);
}

// ---- layouts ----

std::vector<std::string> Layout::choices() const {
  return {fmt::format("pp={} ep={} dp={}", pp, ep, dp), "dispatcher=" + dispatcher, "sharding=" + sharding,
          fmt::format("schedule={} {}", schedule, virtual_stages), "unit=" + unit};
}

std::string Layout::text() const { return fmt::format("{}", fmt::join(choices(), ", ")); }

std::vector<std::string> Layout::overrides(const Variant& variant) const {
  std::vector<std::string> out{
      fmt::format("parallel.pp={}", pp),   fmt::format("parallel.ep={}", ep),
      "parallel.dispatcher=" + dispatcher, "optimizer.sharding=" + sharding,
      "parallel.schedule=" + schedule,     fmt::format("parallel.virtual_stages={}", virtual_stages)};
  if (unit != "global") out.push_back("model.moe.balance_unit=" + unit);
  if (pp == 2 && virtual_stages == 1 && *variant.two_stages)
    out.push_back(fmt::format("parallel.stage_layers={}", variant.two_stages));
  return out;
}

std::vector<Layout> layouts_for(const Variant& variant, int ranks) {
  const bool dense = std::string(variant.name) == "Dense", global = std::string(variant.name) == "GlobalBalance";
  std::vector<Layout> all;
  for (int pp = 1; pp <= ranks; pp *= 2)
    for (int ep = 1; pp * ep <= (dense ? pp : ranks); ep *= 2)
      for (const char* dispatcher : {"allgather", "alltoall"})
        for (const char* sharding : {"none", "dp", "ep_aware"})
          for (const char* schedule : {"1f1b", "gpipe", "interleaved", "zero_bubble"})
            for (const char* unit : {"sequence", "micro_batch"}) {
              if (ep == 1 && std::string(dispatcher) == "alltoall") continue;
              if ((dense || global) && std::string(unit) == "micro_batch") continue;
              const bool interleaved = std::string(schedule) == "interleaved";
              const int dp = ranks / pp, micro_batches = 8 / dp;
              if (interleaved && (pp == 1 || pp == 8 || micro_batches % pp != 0)) continue;
              all.push_back(
                  {pp, ep, dp, dispatcher, sharding, schedule, interleaved ? 2 : 1, global ? "global" : unit});
            }
  return all;
}

std::vector<Layout> covering(const std::vector<Layout>& all) {
  using Pair = std::pair<std::string, std::string>;
  const auto pairs_of = [](const Layout& layout) {
    std::set<Pair> pairs;
    const std::vector<std::string> choices = layout.choices();
    for (size_t i = 0; i < choices.size(); ++i)
      for (size_t j = 0; j <= i; ++j) pairs.insert({choices[j], choices[i]});
    return pairs;
  };
  std::set<Pair> missing;
  for (const Layout& layout : all) missing.merge(pairs_of(layout));
  std::vector<Layout> chosen;
  while (!missing.empty()) {
    const Layout* best = nullptr;
    size_t most = 0;
    for (const Layout& layout : all) {
      size_t fresh = 0;
      for (const Pair& pair : pairs_of(layout)) fresh += missing.count(pair);
      if (fresh > most) most = fresh, best = &layout;
    }
    chosen.push_back(*best);
    for (const Pair& pair : pairs_of(*best)) missing.erase(pair);
  }
  return chosen;
}

// ---- runs ----

const ReferenceRun& reference_of(const Variant& variant, const std::string& unit) {
  static std::map<std::string, ReferenceRun> runs;
  const std::string key = std::string(variant.name) + unit;
  if (const auto found = runs.find(key); found != runs.end()) return found->second;
  ReferenceRun& run = runs[key];
  const RunConfig config =
      config_for(variant, Layout{1, 1, 1, "auto", "ep_aware", "1f1b", 1, unit}.overrides(variant), 1);
  const auto device = make_device();
  const EnginePlan plan = plan_engine(config, EngineUse::train);
  Engine engine(config, EngineUse::train, *device,
                std::make_unique<GapOps>(make_ops(config, *device), *device, run.smallest_gap),
                make_groups(*make_single_process(), config.mesh, *device), plan.memory);
  initialise(engine, *device, variant);
  run.initial_weights = tensors_of(*device, engine, engine.weights());
  for (int64_t step = 0; step < variant.steps; ++step) {
    engine.step(step, weighted_batch(config, step));
    run.results.push_back(engine.result_wait());
    run.gradients.push_back(tensors_of(*device, engine, engine.gradients()));
  }
  run.weights = tensors_of(*device, engine, engine.weights());
  return run;
}

LayoutRun::LayoutRun(const Variant& variant, const Layout& layout, const std::vector<std::string>& more)
    : device(make_device()) {
  std::vector<std::string> overrides = layout.overrides(variant);
  overrides.insert(overrides.end(), more.begin(), more.end());
  config = config_for(variant, overrides, processes().size());
  engine = make_engine(config, EngineUse::train, *device, plan_engine(config, EngineUse::train, processes().rank()),
                       processes());
  initialise(*engine, *device, variant);
}

HostBatch part_of(const HostBatch& whole, int64_t first, int64_t count) {
  HostBatch part;
  part.sequences = count;
  part.sequence_length = whole.sequence_length;
  const int64_t begin = first * whole.sequence_length, end = (first + count) * whole.sequence_length;
  const auto cut = [&](const auto& from, auto& to) { to.assign(from.begin() + begin, from.begin() + end); };
  cut(whole.tokens, part.tokens);
  cut(whole.targets, part.targets);
  cut(whole.positions, part.positions);
  cut(whole.weights, part.weights);
  return part;
}

HostBatch LayoutRun::batch(int64_t step) const {
  return part_of(weighted_batch(config, step), engine->groups().place.dp * config.local_batch(), config.local_batch());
}

void expect_replicas_equal(LayoutRun& run) {
  const Engine& engine = *run.engine;
  const auto expect_all_equal = [&](Communicator& group, const Tensor& mine, const std::string& what) {
    const DeviceTensor all(*run.device, mine.dtype, {mine.elements() * group.size()});
    group.all_gather(mine, *all);
    const std::vector<std::byte> replicas = all.read_wait();
    const auto own = replicas.begin() + group.rank() * mine.bytes();
    for (int rank = 0; rank < group.size(); ++rank)
      EXPECT_TRUE(std::equal(own, own + mine.bytes(), replicas.begin() + rank * mine.bytes()))
          << what << " differs from replica " << rank;
  };
  for (const Bucket& bucket : engine.table().buckets())
    expect_all_equal(bucket.cls == ParameterClass::expert ? *engine.groups().edp : *engine.groups().dp,
                     engine.weights().slice(bucket.begin, bucket.count), fmt::format("layer {}", bucket.layer));
  // A tied embedding is on the first and on the last stage.
  if (!engine.groups().embedding || !engine.config().model.tie_embeddings) return;
  const Tensor embedding = engine.table().view(engine.weights(), engine.table().find("embedding.weight"));
  expect_all_equal(*engine.groups().embedding, embedding.reshape({embedding.elements()}), "the tied embedding");
}

namespace {

const float* part_of(const std::map<std::string, std::vector<float>>& tensors, const Parameter& row) {
  return tensors.at(row.name).data() + global_begin(row);
}

// Gradients are complete where a rank owns them; what all ranks own is the whole model, once.
void expect_gradients(LayoutRun& run, const std::map<std::string, std::vector<float>>& expected) {
  const Engine& engine = *run.engine;
  Comparison gradients;
  const std::vector<float> flat = read_floats_wait(*run.device, engine.gradients());
  for (const FlatRange& owned : engine.master_weights().owned)
    for (const RowRange& range : engine.table().rows_in(owned.begin, owned.count)) {
      const Parameter& row = engine.table()[range.id];
      gradients.add(row.name, flat.data() + range.offset, part_of(expected, row) + range.first, range.count);
    }
  gradients.sum(expected, *run.device, *engine.groups().world);
  gradients.expect_below(bound(), "gradient");
  double compared = 0, whole = 0;
  for (const auto& [name, sums] : gradients.difference_and_norm) compared += sums.second;
  for (const auto& [name, values] : expected)
    for (float value : values) whole += double(value) * double(value);
  EXPECT_NEAR(compared, whole, 1e-9 * whole) << "elements of gradients that no rank or several own";
}

void expect_initial_weights(LayoutRun& run, const std::map<std::string, std::vector<float>>& expected) {
  const Engine& engine = *run.engine;
  for (const auto& [name, values] : tensors_of(*run.device, engine, engine.weights())) {
    const Parameter& row = engine.table()[engine.table().find(name)];
    EXPECT_EQ(std::memcmp(values.data(), part_of(expected, row), values.size() * 4), 0) << "initial " << name;
  }
}

void expect_result(const StepResult& got, const StepResult& expected) {
  EXPECT_TRUE(got.finite);
  EXPECT_NEAR(got.loss, expected.loss, bound() * expected.loss);
  EXPECT_NEAR(got.cross_entropy, expected.cross_entropy, bound() * expected.cross_entropy);
  EXPECT_NEAR(got.balance_loss, expected.balance_loss, bound() * expected.balance_loss);
  EXPECT_NEAR(got.z_loss, expected.z_loss, bound() * expected.z_loss);
  EXPECT_NEAR(got.gradient_norm, expected.gradient_norm, bound() * expected.gradient_norm);
  EXPECT_EQ(got.expert_counts, expected.expert_counts);
}

}  // namespace

void expect_state_after(Engine& engine, Device& device, const ReferenceRun& reference) {
  engine.weights_wait();
  Comparison weights;
  for (const auto& [name, values] : tensors_of(device, engine, engine.weights())) {
    const Parameter& row = engine.table()[engine.table().find(name)];
    weights.add(name, values.data(), part_of(reference.weights, row), row.local.elements());
  }
  weights.sum(reference.weights, device, *engine.groups().world);
  weights.expect_below(bound(), "weights");
}

void expect_equal_to(const ReferenceRun& reference, const Variant& variant, const Layout& layout) {
  LayoutRun run(variant, layout);
  expect_initial_weights(run, reference.initial_weights);
  for (int64_t step = 0; step < variant.steps; ++step) {
    SCOPED_TRACE(fmt::format("step {}", step));
    run.engine->step(step, run.batch(step));
    expect_result(run.engine->result_wait(), reference.results[size_t(step)]);
    expect_gradients(run, reference.gradients[size_t(step)]);
    run.engine->weights_wait();
    expect_replicas_equal(run);
  }
  expect_state_after(*run.engine, *run.device, reference);
}

}  // namespace optimus::test
