// A pipeline schedule is data: for every rank the list of what it does, in order. One executor runs every schedule, one
// checker proves it sound, one simulation finds its bubble; a new schedule is a new generator.
//
// The model is cut into pp * virtual_stages stages; stage s is chunk s / pp of rank s % pp. Every stage runs every
// micro-batch forward, then backward. A backward is one action, or (zero bubble) two: the input gradient, which the
// previous stage waits for, and the weight gradient, which nobody waits for.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace optimus {

enum class ActionKind : uint8_t {
  forward,
  backward,  ///< input and weight gradient together, layer by layer
  backward_input,
  backward_weight,
  send_forward,      ///< activations to stage + 1
  receive_forward,   ///< activations from stage - 1
  send_backward,     ///< gradient to stage - 1
  receive_backward,  ///< gradient from stage + 1
};

std::string_view name_of(ActionKind kind);

struct Action {
  ActionKind kind;
  int micro_batch;
  int chunk;  ///< of this rank; its stage is chunk * pp + rank
  bool operator==(const Action&) const = default;
};

struct Schedule {
  std::string name;
  int pp = 1, virtual_stages = 1, micro_batches = 1;
  std::vector<std::vector<Action>> ranks;  ///< [pp]

  int stages() const { return pp * virtual_stages; }
  int stage(int rank, int chunk) const { return chunk * pp + rank; }
  /// Whether backward comes in two actions.
  bool split_backward() const;
};

/// "gpipe", "1f1b", "interleaved" (with one virtual stage the same as 1f1b) or "zero_bubble"; see schedules.cpp for
/// what each does and its bubble. Error(kUsage) for a combination that the schedule does not offer: virtual_stages > 1
/// other than interleaved or with pp = 1, micro_batches that interleaved cannot group by pp, anything below 1.
void check_schedule(const std::string& name, int64_t pp, int64_t virtual_stages, int64_t micro_batches);
Schedule make_schedule(const std::string& name, int pp, int virtual_stages, int micro_batches);

/// Why the schedule is wrong, or "" for a sound one: every (stage, micro-batch) runs forward once and backward once (or
/// both its halves once, but then everywhere), in that order; micro-batches ascend in every kind of action of a chunk
/// (gradients are written by micro-batch 0 and added to by the others); every message is sent once, after what makes
/// it, received once, before what needs it; between two ranks messages arrive in the order they are sent (NCCL has no
/// tags); and, sends not waiting for their receivers, no rank waits for ever.
std::string check(const Schedule& schedule);

/// Seconds of each action, by stage.
struct StageCost {
  double forward = 1, backward_input = 1, backward_weight = 1;
  double send_forward = 0, send_backward = 0;  ///< from the send action to the arrival at the neighbour
};

struct Timeline {
  double seconds = 0;        ///< from the first action to the last, of all ranks
  std::vector<double> busy;  ///< [pp] seconds of compute
  double bubble = 0;         ///< share of pp * seconds in which a rank computes nothing
};
/// Runs a sound schedule with these costs ([stages]); receives wait, sends do not, and a message is alone on its way.
Timeline simulate(const Schedule& schedule, const std::vector<StageCost>& costs);

/// How many sets of saved activations (slots) each rank needs, its chunks together. A micro-batch holds one from the
/// receive_forward, which puts the stage's input there (in stage 0 from the forward), to the end of the backward
/// (backward_weight where backward is split). The gradient that is sent back lies there, too, so the next micro-batch may
/// have it only when the neighbour has received that: so many slots that no rank waits for ever for one, used in turn.
std::vector<int> slots_needed(const Schedule& schedule);

}  // namespace optimus
