// What the ranks of a layout do in one training step, kernel by kernel and message by message: dry steps of one rank of
// every pipeline stage (all ranks of a stage do the same). No hardware is known here.
#pragma once

#include <string>
#include <vector>

#include "optimus/train/engine_plan.h"

namespace optimus {

/// Kernels and messages of a part of a step. Messages of groups of one rank do not occur.
struct Work {
  std::vector<OpRecord> ops;
  std::vector<MessageRecord> messages;
};

double flops_of(const Work& work);

/// One micro-batch through one chunk of a rank. An undivided backward is all in backward_input.
struct ChunkWork {
  Work forward, backward_input, backward_weight;
  std::vector<MessageRecord> send_forward, send_backward;
};

/// One rank's step, in the order of time.
struct RankWork {
  Work begin;
  std::vector<ChunkWork> chunks;          ///< for every micro-batch
  std::vector<MessageRecord> reductions;  ///< of gradients, begun in the last micro-batch's backward
  Work reduce;                            ///< what of the reduction comes after all backwards
  Work norm;                              ///< squares, and what all ranks agree on
  Work update;
  std::vector<MessageRecord> gathers;  ///< of weights, waited for by the next step's forward
};

/// [pp] of the ranks with dp index 0.
std::vector<RankWork> step_work(const RunConfig& config);

/// What a rank sends in a step over one kind of group with one operation.
struct Communication {
  std::string group, operation;
  double bytes;
  int64_t messages;
};
/// Each of the rank that sends most of it.
std::vector<Communication> communication_of(const RunConfig& config, const std::vector<RankWork>& ranks);

/// The pipeline with all costs proportional to FLOPs and free messages: `seconds` are FLOPs.
Timeline flop_timeline(const RunConfig& config, const std::vector<RankWork>& ranks);

/// The schedule of all micro-batches.
Schedule schedule_of(const RunConfig& config);

}  // namespace optimus
