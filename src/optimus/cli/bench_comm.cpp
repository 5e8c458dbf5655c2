// optimus bench comm [CONFIG.toml] [--set ...] [--json]   collectives over the groups of a layout, under mpirun
//
// Every operation moves `bytes` a rank in all: the buffer that is reduced or gathered, the rows that are exchanged, the
// message that goes round. Rates are the bytes that a rank sends with a ring, by the median time over repetitions, the
// slowest rank counting.
#include <chrono>

#include <CLI/CLI.hpp>

#include "optimus/cli/commands.h"
#include "optimus/cli/op_timer.h"
#include "optimus/cli/ranks.h"
#include "optimus/comm/groups.h"
#include "optimus/ops/ops.h"
#include "optimus/train/backend.h"

namespace optimus {
namespace {

struct CommOptions {
  std::string config;
  std::vector<std::string> overrides;
  int64_t largest_mib = 16;
  bool json = false;
};

struct Row {
  std::string group, operation;
  int64_t bytes;
  double seconds, sent;
};

using Clock = std::chrono::steady_clock;

// Median over repetitions of the slowest rank's time.
double time_of(Processes& processes, Device& device, const std::function<void()>& operation) {
  constexpr int kRepetitions = 15;
  std::vector<double> seconds;
  for (int i = -2; i < kRepetitions; ++i) {
    processes.barrier();
    const auto start = Clock::now();
    operation();
    device.synchronise_wait();
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
    const int64_t slowest = processes.max(nanoseconds);
    if (i >= 0) seconds.push_back(double(slowest) * 1e-9);
  }
  return median(std::move(seconds));
}

std::vector<Row> time_group(Processes& processes, Device& device, const std::string& name, Communicator& group,
                            Tensor a, Tensor b, int64_t bytes) {
  const int64_t ranks = group.size(), count = bytes / 4 / ranks * ranks, piece = count / ranks;
  const Tensor whole = a.slice(0, count), scratch = b.slice(0, count);
  const Tensor part = whole.slice(group.rank() * piece, piece);
  const std::vector<int64_t> rows(size_t(ranks), piece);
  const double sent = double(whole.bytes()) * double(ranks - 1) / double(ranks);
  const int next = int((group.rank() + 1) % ranks), before = int((group.rank() + ranks - 1) % ranks);
  const std::vector<std::pair<const char*, std::function<void()>>> operations{
      {"all_reduce", [&] { group.all_reduce(whole); }},
      {"reduce_scatter", [&] { group.reduce_scatter(whole, part, scratch); }},
      {"all_gather", [&] { group.all_gather(part, whole); }},
      {"all_to_all",
       [&] {
         group.start_all_to_all(whole.reshape({count, 1}), rows, scratch.reshape({count, 1}), rows)->wait();
       }},
      {"send_receive",
       [&] {
         Pending send = group.start_send(whole, next);
         group.start_receive(scratch, before)->wait();
         finish(send);
       }},
  };
  std::vector<Row> out;
  for (const auto& [operation, run] : operations) {
    // See make_groups().
    if (std::string_view(operation) == "send_receive" && device.kind() == DeviceKind::cuda && name != "pp") continue;
    const double factor = std::string_view(operation) == "all_reduce"     ? 2 * sent
                          : std::string_view(operation) == "send_receive" ? double(bytes)
                                                                          : sent;
    out.push_back({name, operation, bytes, time_of(processes, device, run), factor});
  }
  return out;
}

int bench_comm(const CommOptions& options, Processes& processes) {
  require(processes.size() > 1, ErrorKind::kUsage,
          "bench comm needs several ranks: mpirun -n 2 optimus bench comm [CONFIG.toml]");
  require(!options.config.empty() || options.overrides.empty(), ErrorKind::kUsage,
          "--set {} changes a configuration, and none was given: bench comm CONFIG.toml --set ...",
          options.overrides.empty() ? "" : options.overrides[0]);
  MeshShape shape = make_mesh_shape(processes.size(), 1, 1);
  // Without a configuration the GPUs, if there are any.
  bool gpu = cuda_devices() > 0;
  if (!options.config.empty()) {
    const RunConfig config = load_config(options.config, options.overrides, ConfigUse::shape, processes.size());
    shape = config.mesh;
    gpu = config.device_kind() == DeviceKind::cuda;
  }
  const auto device = open_device(gpu ? DeviceKind::cuda : DeviceKind::cpu, processes);
  Groups groups = make_groups(processes, shape, *device);
  const int64_t largest = options.largest_mib << 20;
  Arena arena(*device, "bench", 2 * largest + 1024);
  const Tensor a = arena.allocate(DType::f32, {largest / 4}, "a"), b = arena.allocate(DType::f32, {largest / 4}, "b");
  const auto ops = gpu ? make_cuda_ops(*device, true) : make_cpu_ops();
  for (const Tensor& x : {a, b}) ops->fill_normal(x, 1.0f, philox_for(1, "bench"), uint64_t(processes.rank()), 0);

  std::vector<Row> rows;
  std::vector<std::pair<std::string, Communicator*>> chosen{{"world", groups.world.get()}};
  if (!options.config.empty())
    for (const auto& [name, group] : {std::pair{"dp", groups.dp.get()},
                                      {"ep", groups.ep.get()},
                                      {"edp", groups.edp.get()},
                                      {"pp", groups.pp.get()}})
      if (group->size() > 1) chosen.emplace_back(name, group);
  for (const auto& [name, group] : chosen)
    for (int64_t bytes = std::max<int64_t>(4096, 4 * group->size()); bytes <= largest; bytes *= 8) {
      const std::vector<Row> more = time_group(processes, *device, name, *group, a, b, bytes);
      rows.insert(rows.end(), more.begin(), more.end());
    }
  if (processes.rank() != 0) return 0;
  if (options.json) {
    nlohmann::ordered_json json = nlohmann::ordered_json::array();
    for (const Row& row : rows)
      json.push_back({{"group", row.group},
                      {"operation", row.operation},
                      {"bytes", row.bytes},
                      {"microseconds", row.seconds * 1e6},
                      {"gigabytes_per_second", row.sent / row.seconds / 1e9}});
    fmt::print("{}\n", nlohmann::ordered_json{{"ranks", processes.size()}, {"rows", json}}.dump());
    return 0;
  }
  fmt::print("{:<8} {:<16} {:>12} {:>12} {:>10}\n", "group", "operation", "bytes", "us", "GB/s");
  for (const Row& row : rows)
    fmt::print("{:<8} {:<16} {:>12} {:>12.1f} {:>10.2f}\n", row.group, row.operation, row.bytes, row.seconds * 1e6,
               row.sent / row.seconds / 1e9);
  return 0;
}

}  // namespace

void add_bench_comm(CLI::App& bench) {
  const auto options = std::make_shared<CommOptions>();
  CLI::App* mode = bench.add_subcommand("comm", "Collectives over the groups of a layout, under mpirun");
  mode->add_option("CONFIG", options->config, "Configuration in TOML; without one the group of all ranks");
  mode->add_option("--set", options->overrides, "Override a key: section.key=value")->allow_extra_args(false);
  mode->add_option("--largest", options->largest_mib, "Largest message in MiB")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
  mode->add_flag("--json", options->json, "One line of JSON");
  mode->callback([=] { run_on_ranks([&](Processes& processes) { return bench_comm(*options, processes); }); });
}

}  // namespace optimus
