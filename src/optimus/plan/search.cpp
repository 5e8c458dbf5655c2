#include "optimus/plan/search.h"

#include <algorithm>

#include "optimus/comm/groups.h"
#include "optimus/parallel/dispatchers.h"
#include "optimus/parallel/placements.h"

namespace optimus {
namespace {

struct ScheduleChoice {
  const char* name;
  int64_t virtual_stages;
};
constexpr ScheduleChoice kSchedules[] = {{"1f1b", 1}, {"interleaved", 2}, {"interleaved", 4}, {"zero_bubble", 1}};

RunConfig with_layout(RunConfig config, int64_t pp, int64_t ep, const ScheduleChoice& schedule) {
  config.mesh = make_mesh_shape(config.mesh.world(), pp, ep);
  config.optimizer.sharding = "ep_aware";
  config.parallel = {};
  config.parallel.pp = pp;
  config.parallel.ep = ep;
  config.parallel.schedule = schedule.name;
  config.parallel.virtual_stages = schedule.virtual_stages;
  return config;
}

/// The layout with every micro_batch and dispatcher that it allows.
void add_variants(RunConfig config, std::vector<RunConfig>& layouts) {
  const ParallelConfig& parallel = config.parallel;
  for (int64_t size = 1; config.local_batch() % size == 0; size *= 2) {
    config.train.micro_batch = size;
    if (parallel.virtual_stages > 1 && config.micro_batches() % parallel.pp != 0) break;
    for (const char* dispatcher : {"allgather", "alltoall"}) {
      config.parallel.dispatcher = dispatcher;
      layouts.push_back(config);
      if (parallel.ep == 1) break;
    }
  }
}

/// All layouts of the ranks that divide what they must.
std::vector<RunConfig> possible_layouts(const RunConfig& base) {
  const int64_t world = base.mesh.world(), experts = base.model.moe_layers() > 0 ? base.model.moe->experts : 1;
  std::vector<RunConfig> layouts;
  for (int64_t pp = 1; pp <= base.model.layers; ++pp) {
    if (world % pp != 0 || base.train.global_batch % (world / pp) != 0) continue;
    for (int64_t ep = 1; ep <= experts; ++ep) {
      if (experts % ep != 0 || world / pp % ep != 0) continue;
      for (const ScheduleChoice& schedule : kSchedules) {
        if (pp == 1 && &schedule != kSchedules) break;  // all the same
        if (pp * schedule.virtual_stages <= base.model.layers)
          add_variants(with_layout(base, pp, ep, schedule), layouts);
      }
    }
  }
  return layouts;
}

/// Weights and gradients of the rank with the most layers, without buffers and activations.
double least_memory(const RunConfig& config) {
  ParameterTable table;
  std::vector<Stage> stages;
  for (const Placement& placement : placements_of(config.model, config.parallel, config.mesh, place_of(config.mesh, 0)))
    stages.emplace_back(config.model, placement, config.memory.moe_rows, table);
  table.lay_out(config.mesh.dp, config.mesh.edp);
  return double(table.elements()) * double(size_of(config.compute_dtype()) + size_of(config.gradient_dtype()));
}

/// Seconds of the model's products at the full rate, and of the ranks that wait for the pipeline's first micro-batch.
double least_seconds(const RunConfig& config, const Hardware& hardware) {
  const double ideal = flops_per_token(config.model) * double(config.tokens_per_step()) / config.mesh.world() /
                       std::max(hardware.matmul.value, hardware.grouped_matmul.value);
  const int64_t virtual_stages = config.parallel.virtual_stages;
  if (config.model.layers % (config.mesh.pp * virtual_stages) != 0) return ideal;
  // The last rank, which has the head, too, waits for the forward (a third of a chunk's work) of the ranks above.
  return ideal * (1 + double(config.mesh.pp - 1) / double(3 * virtual_stages * config.micro_batches()));
}

/// Groups of several ranks that the rank belongs to.
int communicators(const MeshShape& shape, int rank) {
  std::vector<MessageRecord> messages;
  const Groups groups = make_dry_groups(shape, rank, messages);
  int count = 0;
  for (const auto* group : {&groups.world, &groups.dp, &groups.ep, &groups.edp, &groups.pp, &groups.embedding})
    count += *group && (*group)->size() > 1;
  return count;
}

/// What the device's libraries hold besides the program's own memory.
void add_libraries(EnginePlan& plan, const RunConfig& config, int rank, const Hardware& hardware) {
  const auto add = [&](const char* name, double bytes) {
    plan.memory.fixed += int64_t(bytes);
    if (bytes > 0) plan.segments[name] = int64_t(bytes);
  };
  const bool exchanges = dispatcher_of(config) == "alltoall";
  add("context", hardware.context.value);
  add("communicators", communicators(config.mesh, rank) * hardware.communicator.value +
                           (int(config.mesh.pp > 1) + int(exchanges)) * hardware.messages.value);
}

}  // namespace

std::string dispatcher_of(const RunConfig& config) {
  return config.model.moe ? dispatcher_for(config.parallel.dispatcher, *config.model.moe, config.mesh.ep) : "local";
}

LargestMemory largest_memory(const RunConfig& config, const std::optional<Hardware>& hardware) {
  LargestMemory largest;
  for (int pp = 0; pp < config.mesh.pp; ++pp) {
    // Of ranks that hold alike layers the first has the most micro-batches in flight; uneven layers may change that.
    const bool edge = pp == 0 || pp == config.mesh.pp - 1;
    const bool uneven =
        !config.parallel.stage_layers.empty() || (config.model.moe && config.model.moe->first_dense_layers > 0);
    if (!edge && !uneven) continue;
    const int rank = rank_of(config.mesh, pp, 0);
    EnginePlan plan = plan_engine(config, EngineUse::train, rank);
    if (hardware) add_libraries(plan, config, rank, *hardware);
    if (pp == 0 || plan.memory.total() > largest.plan.memory.total()) largest = {pp, std::move(plan)};
  }
  return largest;
}

SearchResult search_layouts(const RunConfig& base, const Hardware& hardware, size_t most) {
  std::vector<RunConfig> layouts = possible_layouts(base);
  SearchResult result;
  result.layouts = int64_t(layouts.size());
  std::erase_if(layouts, [&](const RunConfig& config) { return least_memory(config) > hardware.device_bytes.value; });
  std::ranges::stable_sort(layouts, {}, [&](const RunConfig& config) { return least_seconds(config, hardware); });

  const auto seconds_of = [](const Candidate& candidate) { return candidate.prediction.step_seconds; };
  const auto beaten = [&](double seconds) {
    return result.best.size() == most && seconds >= seconds_of(result.best.back());
  };
  for (const RunConfig& config : layouts) {
    if (beaten(least_seconds(config, hardware))) break;
    Candidate candidate{config, 0, predict(config, step_work(config), hardware)};
    if (beaten(seconds_of(candidate))) continue;
    candidate.memory_bytes = largest_memory(config, hardware).plan.memory.total();
    if (double(candidate.memory_bytes) > hardware.device_bytes.value) continue;
    result.best.insert(std::ranges::upper_bound(result.best, seconds_of(candidate), {}, seconds_of),
                       std::move(candidate));
    if (result.best.size() > most) result.best.pop_back();
  }
  return result;
}

}  // namespace optimus
