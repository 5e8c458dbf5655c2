// optimus bench step CONFIG.toml [--set ...] [--json]   whole training steps against the machine's own ceiling
// optimus bench ops  CONFIG.toml [--set ...] [--json]   the same steps op by op
//
// Rates are medians of repeated steps on real data where data.train exists and on random tokens otherwise; routing is
// whatever the router chooses. The ceiling is a 2048-cubed f32 product, measured before and after in the same process.
#include <chrono>

#include <CLI/CLI.hpp>

#include "optimus/cli/commands.h"
#include "optimus/ops/timed_ops.h"
#include "optimus/train/engine.h"
#include "optimus/train/metrics.h"

namespace optimus {
namespace {

struct BenchOptions {
  std::string config;
  std::vector<std::string> overrides;
  int64_t steps = 20;
  bool json = false;
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// FLOP/s of a 2048-cubed f32 product.
double product_ceiling() {
  constexpr int64_t kSize = 2048;
  const auto device = make_cpu_device();
  const auto ops = make_cpu_ops();
  Arena arena(*device, "ceiling", 3 * kSize * kSize * 4);
  const Tensor a = arena.allocate(DType::f32, {kSize, kSize}, "a"), b = arena.allocate(DType::f32, {kSize, kSize}, "b"),
               y = arena.allocate(DType::f32, {kSize, kSize}, "y");
  ops->fill_normal(a, 1.0f, philox_for(1, "bench"), 0, 0);
  ops->fill_normal(b, 1.0f, philox_for(1, "bench"), 1, 0);
  std::vector<double> seconds;
  for (int i = 0; i < 9; ++i) {
    const auto start = Clock::now();
    ops->matmul(a, Transpose::no, b, Transpose::yes, y, {});
    seconds.push_back(seconds_since(start));
  }
  return 2.0 * kSize * kSize * kSize / median(seconds);
}

bool data_exists(const DataConfig& data) {
  if (data.train.empty()) return false;
  return std::all_of(data.train.begin(), data.train.end(), [](const DataSource& source) {
    return fs::exists(source.path) || fs::exists(source.path + ".bin") || fs::exists(source.path + ".npy");
  });
}

HostBatch random_batch(const RunConfig& config, int64_t step) {
  std::vector<int32_t> tokens(size_t(config.tokens_per_step()));
  const Philox generator = philox_for(uint64_t(config.train.seed), "bench tokens");
  for (size_t i = 0; i < tokens.size(); ++i) {
    uint32_t words[4];
    generator(i, uint64_t(step), words);
    tokens[i] = int32_t(words[0] % uint32_t(config.model.vocab));
  }
  return next_token_batch(std::move(tokens), config.model.sequence);
}

struct Bench {
  Bench(const BenchOptions& options, bool timed)
      : config(load_config(options.config, options.overrides, ConfigUse::shape)), device(make_cpu_device()) {
    // The learning rate must be what training has: a router that does not train would stay at its start.
    if (config.train.steps == 0) config.optimizer.decay_steps = std::max<int64_t>(options.steps, 1);
    auto ops = make_cpu_ops();
    if (timed) {
      auto wrapped = std::make_unique<TimedOps>(std::move(ops));
      profile = wrapped.get();
      ops = std::move(wrapped);
    }
    plan = plan_engine(config, EngineUse::train);
    check_fits(plan, *device);
    engine = std::make_unique<Engine>(config, EngineUse::train, *device, std::move(ops), plan.memory);
    engine->initialise(uint64_t(config.train.seed));
    real_data = data_exists(config.data);
    if (real_data)
      loader.emplace(
          config.data,
          BatchPart{config.model.sequence, config.model.vocab, config.train.global_batch, 0, config.train.global_batch},
          config.train.seed);
  }

  double step(int64_t number) {
    const HostBatch batch = loader ? loader->next(number) : random_batch(config, number);
    const auto start = Clock::now();
    engine->step(number, batch);
    result = engine->result_wait();
    return seconds_since(start);
  }
  /// Busiest expert over the mean, worst layer of the last step.
  double max_over_mean() const {
    double worst = 0;
    for (const auto& counts : result.expert_counts) worst = std::max(worst, layer_load(0, counts).max_over_mean);
    return worst;
  }

  RunConfig config;
  std::unique_ptr<Device> device;
  TimedOps* profile = nullptr;
  EnginePlan plan;
  std::unique_ptr<Engine> engine;
  std::optional<Loader> loader;
  bool real_data = false;
  StepResult result;
};

void bench_step(const BenchOptions& options) {
  const double ceiling_before = product_ceiling();
  Bench bench(options, false);
  for (int64_t i = 0; i < 3; ++i) bench.step(i);
  std::vector<double> seconds;
  for (int64_t i = 0; i < options.steps; ++i) seconds.push_back(bench.step(3 + i));
  const double ceiling = std::max(ceiling_before, product_ceiling());
  const double step_seconds = median(seconds);
  const double tokens = double(bench.config.tokens_per_step());
  const double flops = tokens * flops_per_token(bench.config.model) / step_seconds;
  if (options.json) {
    fmt::print("{}\n", nlohmann::ordered_json{{"tokens_per_second", tokens / step_seconds},
                                              {"step_seconds", step_seconds},
                                              {"gflops", flops / 1e9},
                                              {"ceiling_gflops", ceiling / 1e9},
                                              {"share_of_ceiling", flops / ceiling},
                                              {"data", bench.real_data ? "data.train" : "random tokens"},
                                              {"routing", "natural"},
                                              {"max_over_mean", bench.max_over_mean()}}
                           .dump());
    return;
  }
  fmt::print("{:.0f} tokens/s, {:.1f} GFLOP/s: {:.1f} % of the ceiling, {:.1f} GFLOP/s (f32 product, 2048 cubed)\n",
             tokens / step_seconds, flops / 1e9, 100 * flops / ceiling, ceiling / 1e9);
  fmt::print("step {:.1f} ms (median of {}), {}, natural routing", step_seconds * 1e3, options.steps,
             bench.real_data ? "data.train" : "random tokens");
  if (!bench.result.expert_counts.empty()) fmt::print(", busiest expert {:.2f} x the mean", bench.max_over_mean());
  fmt::print("\n");
}

void bench_ops(const BenchOptions& options) {
  const double ceiling = product_ceiling();
  Bench bench(options, true);
  for (int64_t i = 0; i < 3; ++i) bench.step(i);
  bench.profile->clear();
  double total = 0;
  for (int64_t i = 0; i < options.steps; ++i) total += bench.step(3 + i);

  std::vector<std::pair<std::string, OpTotals>> rows(bench.profile->totals().begin(), bench.profile->totals().end());
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  const double steps = double(options.steps);
  if (options.json) {
    nlohmann::ordered_json json = nlohmann::ordered_json::array();
    for (const auto& [name, row] : rows)
      json.push_back({{"op", name},
                      {"calls", double(row.calls) / steps},
                      {"milliseconds", row.seconds / steps * 1e3},
                      {"gflops", row.flops / row.seconds / 1e9},
                      {"gigabytes_per_second", row.bytes / row.seconds / 1e9}});
    fmt::print("{}\n", nlohmann::ordered_json{{"ceiling_gflops", ceiling / 1e9}, {"ops", json}}.dump());
    return;
  }
  fmt::print("ceiling {:.1f} GFLOP/s (f32 product, 2048 cubed); a step under the timer takes {:.2f} ms\n",
             ceiling / 1e9, total / steps * 1e3);
  fmt::print("{:<24} {:>7} {:>10} {:>7} {:>10} {:>9} {:>8}\n", "op", "calls", "ms/step", "share", "GFLOP/s", "of ceil.",
             "GB/s");
  for (const auto& [name, row] : rows)
    fmt::print("{:<24} {:>7.1f} {:>10.3f} {:>6.1f}% {:>10.1f} {:>8.1f}% {:>8.1f}\n", name, double(row.calls) / steps,
               row.seconds / steps * 1e3, 100 * row.seconds / total, row.flops / row.seconds / 1e9,
               100 * row.flops / row.seconds / ceiling, row.bytes / row.seconds / 1e9);
}

void add_mode(CLI::App& bench, const std::string& name, const std::string& help,
              void (*run)(const BenchOptions& options)) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* mode = bench.add_subcommand(name, help);
  mode->add_option("CONFIG", options->config, "Configuration in TOML")->required();
  mode->add_option("--set", options->overrides, "Override a key: section.key=value")->allow_extra_args(false);
  mode->add_option("--steps", options->steps, "Steps to time")->capture_default_str()->check(CLI::PositiveNumber);
  mode->add_flag("--json", options->json, "One line of JSON");
  mode->callback([=] { run(*options); });
}

}  // namespace

void add_bench(CLI::App& program) {
  CLI::App* bench = program.add_subcommand("bench", "Speed against this machine's own ceiling");
  bench->require_subcommand(1);
  add_mode(*bench, "step", "Whole training steps", bench_step);
  add_mode(*bench, "ops", "Training steps, op by op", bench_ops);
}

}  // namespace optimus
