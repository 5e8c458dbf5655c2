#include "optimus/train/engine_plan.h"

#include "optimus/train/backend.h"

namespace optimus {
namespace {

/// One rank on a dry device. An engine's dry twin shares nothing with it but the code.
struct DryRun {
  DryRun(const RunConfig& config, EngineUse use, int rank) : device(make_dry_device(config.device_kind())) {
    auto owned = std::make_unique<DryOps>(config.device_kind(), config.run.deterministic);
    ops = owned.get();
    engine.emplace(config, use, *device, std::move(owned),
                   make_dry_groups(config.mesh, rank, messages, config.device_kind()), EngineMemory{});
    ops->clear();
    messages.clear();
  }
  HostBatch batch(int64_t sequences) const {  // a shape only: a dry device reads nothing
    HostBatch batch;
    batch.sequences = sequences;
    batch.sequence_length = engine->config().model.sequence;
    return batch;
  }

  std::unique_ptr<Device> device;
  std::vector<MessageRecord> messages;
  DryOps* ops;
  std::optional<Engine> engine;
};

/// The same run with so few micro-batches that more change nothing but the work: the pipeline is full with them.
RunConfig shortened(RunConfig config) {
  const int64_t pp = config.mesh.pp, most = config.parallel.schedule == "gpipe" ? config.micro_batches() : 2 * pp;
  if (config.micro_batches() > most) config.train.global_batch = most * config.train.micro_batch * config.mesh.dp;
  return config;
}

}  // namespace

EnginePlan plan_engine(const RunConfig& config, EngineUse use, int rank) {
  const RunConfig planned = use == EngineUse::train ? shortened(config) : config;
  DryRun run(planned, use, rank);
  EnginePlan plan;
  if (use == EngineUse::train) {
    run.engine->step(0, run.batch(planned.local_batch()));
    // Micro-batches are alike.
    plan.step_flops = run.ops->total_flops() / double(planned.micro_batches()) * double(config.micro_batches());
  }
  const HostBatch batch = run.batch(config.train.micro_batch);
  if (use == EngineUse::gradients) run.engine->gradients_wait(batch);
  if (use == EngineUse::generation) run.engine->decode_wait(std::vector<int32_t>(size_t(config.model.sequence)));
  else run.engine->evaluate_wait(batch);
  plan.memory = run.engine->peak_memory();
  plan.segments = run.engine->peak_segments();
  if (use == EngineUse::train) {
    // The batch's buffers are those of all micro-batches.
    const int64_t tokens = (config.local_batch() - planned.local_batch()) * config.model.sequence;
    const auto rounded = [](int64_t bytes) {
      return (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
    };
    const int64_t planned_tokens = planned.local_batch() * config.model.sequence;
    const int64_t more = 4 * (rounded((planned_tokens + tokens) * 4) - rounded(planned_tokens * 4));
    plan.memory.persistent += more;
    plan.segments["batch"] += more;
  }
  return plan;
}

Trace trace_step(const RunConfig& config, int rank) {
  DryRun run(config, EngineUse::train, rank);
  Trace trace;
  run.engine->on_action = [&](const Action* action) {
    trace.phases.push_back(
        {action ? std::optional<Action>(*action) : std::nullopt, run.ops->records().size(), run.messages.size()});
  };
  run.engine->further_waves = false;
  run.engine->step(0, run.batch(config.local_batch()));
  trace.ops = run.ops->records();
  trace.messages = run.messages;
  return trace;
}

int sharers(const Device& device, const Processes& processes) {
  return device.kind() == DeviceKind::cpu ? processes.local_size() : 1;
}

void check_fits(const EnginePlan& plan, const Device& device, int sharers) {
  if (device.capacity() > 0 && plan.memory.total() > device.capacity() / sharers) {
    std::vector<std::pair<int64_t, std::string>> largest;
    for (const auto& [name, bytes] : plan.segments) largest.emplace_back(bytes, name);
    std::sort(largest.rbegin(), largest.rend());
    std::string names;
    for (size_t i = 0; i < std::min<size_t>(3, largest.size()); ++i)
      names += fmt::format("{}{} {:.1f} GiB", i ? ", " : "", largest[i].second, double(largest[i].first) / 0x1p30);
    fail(ErrorKind::kMemory,
         "the run needs {:.1f} GiB, the device has {:.1f}{}; the largest segments are: {}. A smaller train.micro_batch "
         "or "
         "model.sequence needs less",
         double(plan.memory.total()) / 0x1p30, double(device.capacity() / sharers) / 0x1p30,
         sharers > 1 ? fmt::format(" for each of {} ranks", sharers) : "", names);
  }
}

std::unique_ptr<Engine> make_engine(const RunConfig& config, EngineUse use, Device& device, const EnginePlan& plan,
                                    Processes& processes) {
  // Communicators take a GPU's memory, too: they come before it is asked what is left.
  Groups groups = make_groups(processes, config.mesh, device);
  check_fits(plan, device, sharers(device, processes));
  return std::make_unique<Engine>(config, use, device, make_ops(config, device), std::move(groups), plan.memory);
}

std::unique_ptr<Engine> make_engine(const RunConfig& config, EngineUse use, Device& device, const EnginePlan& plan) {
  return make_engine(config, use, device, plan, *make_single_process());
}

}  // namespace optimus
