// Engines by plan: what one rank needs and does, found by running its step dry, and engines made with just that memory.
#pragma once

#include "optimus/ops/dry/dry_ops.h"
#include "optimus/train/engine.h"

namespace optimus {

/// Memory and work of one step of one rank, found by running it dry.
struct EnginePlan {
  EngineMemory memory;
  std::map<std::string, int64_t> segments;  ///< bytes at each arena's peak
  double step_flops = 0;                    ///< of the products of one step, all micro-batches
};
EnginePlan plan_engine(const RunConfig& config, EngineUse use, int rank = 0);

/// What one rank does in one step, action by action.
struct Trace {
  struct Phase {
    std::optional<Action> action;  ///< nothing: the end of the step (norm, update, gathering)
    size_t first_op, first_message;
  };
  std::vector<Phase> phases;
  std::vector<OpRecord> ops;
  std::vector<MessageRecord> messages;
};
/// A dry step of one rank whose experts are balanced.
Trace trace_step(const RunConfig& config, int rank);

/// How many ranks share the device's memory: those of a machine its CPU's, one a GPU's.
int sharers(const Device& device, const Processes& processes);
/// Throws Error(kMemory) naming the largest segments when the plan does not fit the device, shared by that many ranks.
void check_fits(const EnginePlan& plan, const Device& device, int sharers = 1);

/// For a run on this machine. Throws Error(kMemory) naming the largest segments when the plan does not fit the device.
std::unique_ptr<Engine> make_engine(const RunConfig& config, EngineUse use, Device& device, const EnginePlan& plan,
                                    Processes& processes);
/// The same on a single process.
std::unique_ptr<Engine> make_engine(const RunConfig& config, EngineUse use, Device& device, const EnginePlan& plan);

}  // namespace optimus
