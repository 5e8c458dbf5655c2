// optimus bench step CONFIG.toml [--set ...] [--profile] [--json]       whole training steps against the machine's own
//                                                                       ceiling; with --profile op by op
// optimus bench ops  CONFIG.toml [--set ...] [--only TEXT] [--json]     every kernel alone, see bench_ops.cpp
// optimus bench ops  CONFIG.toml [--set ...] --tune                     which of a library's algorithms are fastest in a step
//
// Under mpirun the ranks share the work as the configuration says; with a pipeline, `step` also reports the bubble, as
// measured and as the schedule's simulation has it with the measured times of its actions.
//
// Rates are medians of repeated steps on real data where data.train exists and on random tokens otherwise; routing is
// whatever the router chooses. The ceiling is that of op_timer.h, measured in the same process before the steps.
#include <chrono>
#include <numeric>

#include <CLI/CLI.hpp>

#include "optimus/checkpoint/run_folder.h"
#include "optimus/cli/bench_ops.h"
#include "optimus/cli/commands.h"
#include "optimus/cli/ranks.h"
#include "optimus/comm/timed.h"
#include "optimus/ops/timed_ops.h"
#include "optimus/train/backend.h"
#include "optimus/train/engine_plan.h"
#include "optimus/train/metrics.h"
#include "optimus/train/run_state.h"

namespace optimus {
namespace {

struct BenchOptions {
  std::string config;
  std::vector<std::string> overrides;
  int64_t steps = 20;
  bool profile = false, tune = false;
  std::string only;
  bool json = false;
};

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

bool data_exists(const DataConfig& data) {
  if (data.train.empty()) return false;
  return std::all_of(data.train.begin(), data.train.end(), [](const DataSource& source) {
    return fs::exists(source.path) || fs::exists(source.path + ".bin") || fs::exists(source.path + ".npy");
  });
}

HostBatch random_batch(const RunConfig& config, int64_t step, int64_t first_sequence, int64_t sequences) {
  std::vector<int32_t> tokens(size_t(sequences * config.model.sequence));
  const Philox generator = philox_for(uint64_t(config.train.seed), "bench tokens");
  for (size_t i = 0; i < tokens.size(); ++i) {
    uint32_t words[4];
    generator(i + size_t(first_sequence * config.model.sequence), uint64_t(step), words);
    tokens[i] = int32_t(words[0] % uint32_t(config.model.vocab));
  }
  return next_token_batch(std::move(tokens), config.model.sequence);
}

struct Bench {
  Bench(const BenchOptions& options, Processes& processes, bool timed)
      : config(load_config(options.config, options.overrides, ConfigUse::shape, processes.size())),
        device(open_device(config.device_kind(), processes)),
        first_sequence(place_of(config.mesh, processes.rank()).dp * config.local_batch()) {
    // The learning rate must be what training has: a router that does not train would stay at its start.
    if (config.train.steps == 0) config.optimizer.decay_steps = std::max<int64_t>(options.steps, 1);
    auto ops = make_ops(config, *device);
    ceiling = OpTimer(config, *device, *ops).measure_product().flops_per_second();
    if (timed) {
      auto wrapped = std::make_unique<TimedOps>(std::move(ops), *device);
      profile = wrapped.get();
      ops = std::move(wrapped);
    }
    plan = plan_engine(config, EngineUse::train, processes.rank());
    Groups groups = with_waits(make_groups(processes, config.mesh, *device));
    check_fits(plan, *device, sharers(*device, processes));
    engine =
        std::make_unique<Engine>(config, EngineUse::train, *device, std::move(ops), std::move(groups), plan.memory);
    take_choices(
        *engine, [&] { return read_tuning(config.run.dir); }, processes);
    engine->initialise(uint64_t(config.train.seed));
    real_data = data_exists(config.data);
    if (real_data)
      loader.emplace(config.data,
                     BatchPart{config.model.sequence, config.model.vocab, config.train.global_batch, first_sequence,
                               config.local_batch()},
                     config.train.seed);
  }

  Groups with_waits(Groups groups) {
    for (const auto& [name, group] : {std::pair{"world", &groups.world},
                                      {"dp", &groups.dp},
                                      {"ep", &groups.ep},
                                      {"edp", &groups.edp},
                                      {"pp", &groups.pp},
                                      {"embedding", &groups.embedding}})
      if (*group && (*group)->size() > 1) *group = make_timed_communicator(std::move(*group), *device, waits[name]);
    return groups;
  }

  double step(int64_t number) {
    const HostBatch batch =
        loader ? loader->next(number) : random_batch(config, number, first_sequence, config.local_batch());
    const auto start = Clock::now();
    engine->step(number, batch);
    result = engine->result_wait();
    const double seconds = seconds_since(start);
    for (auto& [name, group] : waits) waited[name].push_back(group.take_wait());
    return seconds;
  }

  RunConfig config;
  std::unique_ptr<Device> device;
  int64_t first_sequence;
  double ceiling = 0;  ///< FLOP/s of one device
  TimedOps* profile = nullptr;
  EnginePlan plan;
  std::map<std::string, Waits> waits;                 ///< by group
  std::map<std::string, std::vector<double>> waited;  ///< seconds of each step
  std::unique_ptr<Engine> engine;
  std::optional<Loader> loader;
  bool real_data = false;
  StepResult result;
};

/// Busiest expert over the mean, worst layer.
double max_over_mean(const StepResult& result) {
  double worst = 0;
  for (const auto& counts : result.expert_counts) worst = std::max(worst, layer_load(0, counts).max_over_mean);
  return worst;
}

/// Seconds of this rank's actions by kind and chunk, and of whole schedules. The device is waited for between actions, so
/// steps under it take longer on a GPU.
class ActionTimes {
 public:
  explicit ActionTimes(Engine& engine) : device_(engine.device()) {
    engine.on_action = [this](const Action* action) { begin(action); };
  }
  /// [chunk][forward, backward (or its input half), weight half], a text for the other ranks.
  std::string text() const { return nlohmann::json{{"actions", seconds_}, {"schedule", schedule_}}.dump(); }

 private:
  void begin(const Action* action) {
    device_.synchronise_wait();
    const auto now = Clock::now();
    if (last_)
      seconds_[fmt::format("{} {}", int(last_->kind), last_->chunk)].push_back(
          std::chrono::duration<double>(now - last_time_).count());
    if (!last_ && action) first_time_ = now;
    if (!action) schedule_.push_back(std::chrono::duration<double>(now - first_time_).count());
    last_time_ = now;
    last_ = action ? std::optional<Action>(*action) : std::nullopt;
  }

  Device& device_;
  std::map<std::string, std::vector<double>> seconds_;
  std::vector<double> schedule_;
  std::optional<Action> last_;
  Clock::time_point last_time_, first_time_;
};

struct Bubbles {
  double measured = 0, predicted = 0;
};

// Measured: the share of the schedules' time, over all ranks, in which no forward or backward ran. Predicted: that of the
// schedule's simulation with the actions' median times. What backward waits for (a reduction that is not done) counts as
// its own time.
Bubbles bubbles_of(const Engine& engine, const std::vector<std::string>& texts) {
  const Schedule& schedule = engine.schedule();
  std::vector<std::array<std::vector<double>, 3>> seconds(size_t(schedule.stages()));  // of all replicas of a stage
  double busy = 0, all = 0;
  for (size_t text = 0; text < texts.size(); ++text) {
    const nlohmann::json times = nlohmann::json::parse(texts[text]);
    const int pp = int(text) / (engine.groups().shape.dp);
    for (const double seconds : times["schedule"]) all += seconds;
    for (const auto& [key, values] : times["actions"].items()) {
      const size_t space = key.find(' ');
      const auto kind = ActionKind(std::stoi(key.substr(0, space)));
      const int part = kind == ActionKind::forward                                          ? 0
                       : kind == ActionKind::backward || kind == ActionKind::backward_input ? 1
                       : kind == ActionKind::backward_weight                                ? 2
                                                                                            : -1;
      if (part < 0) continue;
      std::vector<double>& pool = seconds[size_t(schedule.stage(pp, std::stoi(key.substr(space))))][size_t(part)];
      for (const double value : values) {
        pool.push_back(value);
        busy += value;
      }
    }
  }
  std::vector<StageCost> costs;
  for (const auto& stage : seconds) {
    const auto typical = [](const std::vector<double>& values) { return values.empty() ? 0.0 : median(values); };
    costs.push_back({typical(stage[0]), typical(stage[1]), typical(stage[2]), 0, 0});
  }
  return {1 - busy / all, simulate(schedule, costs).bubble};
}

/// Seconds of a step in which a rank's work stood still for a group's transfers: the median of the steps, the mean of the
/// ranks. For a pipeline that is its bubble, too.
std::map<std::string, double> mean_waits(const std::vector<std::string>& texts) {
  std::map<std::string, double> out;
  for (const std::string& text : texts) {
    const auto waited = nlohmann::json::parse(text).get<std::map<std::string, std::vector<double>>>();
    for (const auto& [name, seconds] : waited) out[name] += median(seconds) / double(texts.size());
  }
  return out;
}

std::string ceiling_text(const RunConfig& config) {
  return config.device_kind() == DeviceKind::cuda ? "bf16 product, 8192 cubed" : "f32 product, 2048 cubed";
}

int print_profile(const Bench& bench, double seconds, const BenchOptions& options) {
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
    fmt::print("{}\n", nlohmann::ordered_json{{"ceiling_gflops", bench.ceiling / 1e9}, {"ops", json}}.dump());
    return 0;
  }
  fmt::print("ceiling {:.1f} GFLOP/s ({}); a step under the timer takes {:.2f} ms\n", bench.ceiling / 1e9,
             ceiling_text(bench.config), seconds / steps * 1e3);
  fmt::print("{:<24} {:>7} {:>10} {:>7} {:>10} {:>9} {:>8}\n", "op", "calls", "ms/step", "share", "GFLOP/s", "of ceil.",
             "GB/s");
  for (const auto& [name, row] : rows)
    fmt::print("{:<24} {:>7.1f} {:>10.3f} {:>6.1f}% {:>10.1f} {:>8.1f}% {:>8.1f}\n", name, double(row.calls) / steps,
               row.seconds / steps * 1e3, 100 * row.seconds / seconds, row.flops / row.seconds / 1e9,
               100 * row.flops / row.seconds / bench.ceiling, row.bytes / row.seconds / 1e9);
  return 0;
}

int bench_step(const BenchOptions& options, Processes& processes) {
  Bench bench(options, processes, options.profile);
  for (int64_t i = 0; i < 3; ++i) bench.step(i);
  if (options.profile) bench.profile->clear();
  bench.waited.clear();
  std::vector<double> seconds;
  for (int64_t i = 0; i < options.steps; ++i) seconds.push_back(bench.step(3 + i));
  const std::vector<std::string> waited = processes.gather(nlohmann::json(bench.waited).dump());
  const StepResult result = bench.result;
  ActionTimes times(*bench.engine);
  for (int64_t i = 0; bench.config.mesh.pp > 1 && i < options.steps; ++i) bench.step(3 + options.steps + i);
  bench.engine->on_action = nullptr;
  processes.barrier();
  const std::vector<std::string> texts = processes.gather(times.text());
  // Of the rank that has most.
  const int64_t used = processes.max(bench.device->used_bytes()), planned = processes.max(bench.plan.memory.total());
  if (processes.rank() != 0) return 0;
  if (options.profile) return print_profile(bench, std::accumulate(seconds.begin(), seconds.end(), 0.0), options);
  const double ceiling = double(processes.size()) * bench.ceiling;
  const double step_seconds = median(seconds);
  const double tokens = double(bench.config.tokens_per_step());
  const double flops = tokens * flops_per_token(bench.config.model) / step_seconds;
  const std::map<std::string, double> waits = mean_waits(waited);
  std::optional<Bubbles> bubbles;
  if (bench.config.mesh.pp > 1) bubbles = bubbles_of(*bench.engine, texts);
  if (options.json) {
    nlohmann::ordered_json json{{"tokens_per_second", tokens / step_seconds},
                                {"step_seconds", step_seconds},
                                {"ranks", processes.size()},
                                {"device", bench.config.run.device},
                                {"gflops", flops / 1e9},
                                {"ceiling_gflops", ceiling / 1e9},
                                {"share_of_ceiling", flops / ceiling},
                                {"data", bench.real_data ? "data.train" : "random tokens"},
                                {"routing", "natural"},
                                {"max_over_mean", max_over_mean(result)},
                                {"loss", result.loss},
                                {"planned_bytes", planned}};
    if (used > 0) json["used_bytes"] = used;
    if (!waits.empty()) json["waited_seconds"] = waits;
    if (bubbles) json["bubble"] = {{"measured", bubbles->measured}, {"predicted", bubbles->predicted}};
    fmt::print("{}\n", json.dump());
    return 0;
  }
  fmt::print("{:.0f} tokens/s, {:.1f} GFLOP/s: {:.1f} % of the ceiling, {:.1f} GFLOP/s ({}{})\n", tokens / step_seconds,
             flops / 1e9, 100 * flops / ceiling, ceiling / 1e9, ceiling_text(bench.config),
             processes.size() == 1 ? "" : fmt::format(", times {} ranks", processes.size()));
  fmt::print("step {:.1f} ms (median of {}), {}, natural routing", step_seconds * 1e3, options.steps,
             bench.real_data ? "data.train" : "random tokens");
  if (!result.expert_counts.empty()) fmt::print(", busiest expert {:.2f} x the mean", max_over_mean(result));
  fmt::print("\nmemory {:.2f} GB planned", double(planned) / 1e9);
  if (used > 0) fmt::print(", {:.2f} GB of the device in use", double(used) / 1e9);
  for (const auto& [name, seconds] : waits)
    fmt::print("{} {} {:.1f} ms", name == waits.begin()->first ? "\nwaited a step for" : ",", name, 1e3 * seconds);
  if (bubbles)
    fmt::print("\nbubble {:.1f} % measured, {:.1f} % predicted by the schedule with the measured times of its actions",
               100 * bubbles->measured, 100 * bubbles->predicted);
  fmt::print("\n");
  return 0;
}

/// A step and an evaluation in which each product tries all algorithms that the library offers.
int tune(const BenchOptions& options, Processes& processes) {
  Bench bench(options, processes, false);
  require(bench.config.device_kind() == DeviceKind::cuda, ErrorKind::kUsage,
          "--tune is for GPUs: on a CPU there is nothing to choose");
  bench.engine->set_choices({});  // of an earlier table: all are made anew
  bench.engine->start_tuning_wait();
  bench.step(0);
  bench.engine->evaluate_wait(random_batch(bench.config, 0, 0, bench.config.train.micro_batch));
  const fs::path file = write_tuning(bench.config.run.dir, bench.engine->choices());
  fmt::print("{}\n", nlohmann::ordered_json{{"out", file.string()}}.dump());
  return 0;
}

int bench_kernels(const BenchOptions& options, Processes& processes) {
  require(processes.size() == 1, ErrorKind::kUsage, "bench ops measures one device; start it without mpirun");
  if (options.tune) return tune(options, processes);
  const RunConfig config = load_config(options.config, options.overrides, ConfigUse::shape);
  const auto device = open_device(config.device_kind(), processes);
  const auto ops = make_ops(config, *device);
  const auto [ceilings, measured] = bench_ops(config, options.only, *device, *ops);
  std::vector<OpRow> rows{ceilings.product, ceilings.copy, ceilings.small_copy};
  rows.insert(rows.end(), measured.begin(), measured.end());
  if (options.json) {
    nlohmann::ordered_json json = nlohmann::ordered_json::array();
    for (const OpRow& row : rows)
      json.push_back({{"op", row.name},
                      {"shape", row.shape},
                      {"microseconds", row.seconds * 1e6},
                      {"tflops", row.flops / row.seconds / 1e12},
                      {"share_of_product", row.flops_per_second() / ceilings.product.flops_per_second()},
                      {"terabytes_per_second", row.bytes / row.seconds / 1e12},
                      {"share_of_copy", row.bytes_per_second() / ceilings.copy.bytes_per_second()}});
    fmt::print("{}\n", nlohmann::ordered_json{{"device", config.run.device}, {"rows", json}}.dump());
    return 0;
  }
  fmt::print("{:<42} {:<52} {:>10} {:>9} {:>7} {:>7} {:>7}\n", "op", "shape", "us", "TFLOP/s", "of max", "TB/s",
             "of max");
  for (const OpRow& row : rows) {
    fmt::print("{:<42} {:<52} {:>10.1f}", row.name, row.shape, row.seconds * 1e6);
    if (row.flops > 0)
      fmt::print(" {:>9.2f} {:>6.1f}%", row.flops / row.seconds / 1e12,
                 100 * row.flops_per_second() / ceilings.product.flops_per_second());
    else fmt::print(" {:>9} {:>7}", "", "");
    fmt::print(" {:>7.3f} {:>6.1f}%\n", row.bytes / row.seconds / 1e12,
               100 * row.bytes_per_second() / ceilings.copy.bytes_per_second());
  }
  return 0;
}

void add_mode(CLI::App& bench, const std::string& name, const std::string& help,
              int (*run)(const BenchOptions& options, Processes& processes)) {
  const bool steps = run == bench_step;
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* mode = bench.add_subcommand(name, help);
  mode->add_option("CONFIG", options->config, "Configuration in TOML")->required();
  mode->add_option("--set", options->overrides, "Override a key: section.key=value")->allow_extra_args(false);
  if (steps) {
    mode->add_option("--steps", options->steps, "Steps to time")->capture_default_str()->check(CLI::PositiveNumber);
    mode->add_flag("--profile", options->profile, "Op by op; each is waited for");
  } else {
    mode->add_option("--only", options->only, "Cases whose name or shape contains this");
    mode->add_flag("--tune", options->tune, "Time a library's algorithms in a step and keep the choice in run.dir");
  }
  mode->add_flag("--json", options->json, "One line of JSON");
  mode->callback([=] { run_on_ranks([&](Processes& processes) { return run(*options, processes); }); });
}

}  // namespace

void add_bench(CLI::App& program) {
  CLI::App* bench = program.add_subcommand("bench", "Speed against this machine's own ceiling");
  bench->require_subcommand(1);
  add_mode(*bench, "step", "Whole training steps", bench_step);
  add_mode(*bench, "ops", "Every kernel of a step, alone", bench_kernels);
  add_bench_comm(*bench);
}

}  // namespace optimus
