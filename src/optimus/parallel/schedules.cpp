// The pipeline schedules. A generator lists what every rank computes; one pass, the same for all, adds the messages.
//
// F, B and W are the seconds in which a rank runs one micro-batch through all its chunks: forward, input gradient,
// weight gradient. With all ranks alike and messages free, a step lasts M (F + B + W) and
//   gpipe, 1f1b    (pp - 1) (F + B + W)
//   interleaved    (pp - 1) (F + B + W) / virtual_stages
//   zero_bubble    (pp - 1) (F + B - W), for F = B = W and M >= pp
#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "optimus/base/error.h"
#include "optimus/parallel/schedule.h"

namespace optimus {
namespace {

using enum ActionKind;

constexpr std::array kNames = {"gpipe", "1f1b", "interleaved", "zero_bubble"};

// ---- what the ranks compute ----

/// gpipe, 1f1b and interleaved differ in how many forwards a rank begins with.
int warmup_forwards(const Schedule& schedule, int rank) {
  const int total = schedule.micro_batches * schedule.virtual_stages, ranks_below = schedule.pp - 1 - rank;
  if (schedule.name == "gpipe") return total;
  // As many as the ranks that the first micro-batch still has to pass.
  if (schedule.virtual_stages == 1) return std::min(total, ranks_below);
  // Megatron: the first group runs through all chunks but the last; then a forward for each step in which the first
  // micro-batch goes down the ranks below and its gradient comes up again.
  return std::min(total, (schedule.virtual_stages - 1) * schedule.pp + 2 * ranks_below);
}

/// Forwards to warm up, then forward and backward in turns, then the backwards that are left. Groups of pp
/// micro-batches run through one chunk after the other: forward from the first, backward from the last.
std::vector<Action> alternate(const Schedule& schedule, int warmup) {
  const int pp = schedule.pp, virtual_stages = schedule.virtual_stages, group = pp * virtual_stages;
  const int total = schedule.micro_batches * virtual_stages;
  const auto micro_batch = [&](int n) { return n / group * pp + n % pp; };
  const auto chunk = [&](int n) { return n % group / pp; };
  std::vector<Action> actions;
  for (int n = 0; n < total + warmup; ++n) {
    if (n < total) actions.push_back({forward, micro_batch(n), chunk(n)});
    const int b = n - warmup;
    if (b >= 0) actions.push_back({backward, micro_batch(b), virtual_stages - 1 - chunk(b)});
  }
  return actions;
}

/// ZB-H1 (arXiv 2401.10241) by list scheduling with F = B = W = 1. In every unit of time a rank takes the next forward
/// if it is ready, rank p has fewer than pp - p micro-batches between forward and input gradient, as in 1F1B, and fewer
/// than pp hold saved activations, 1F1B's most; else an input gradient, if one is ready; else a weight gradient, which
/// nobody waits for and which fills what would be a bubble. (Input gradients first would let a forward slip, and with
/// it the ranks below.)
std::vector<std::vector<Action>> zero_bubble(int pp, int micro_batches) {
  struct Done {
    int forward = 0, input = 0, weight = 0;  // micro-batches
  };
  std::vector<std::vector<Action>> ranks(static_cast<size_t>(pp));
  std::vector<Done> done(static_cast<size_t>(pp));
  while (std::ranges::any_of(done, [&](const Done& rank) { return rank.weight < micro_batches; })) {
    const std::vector<Done> before = done;  // neighbours use in the next unit what this one makes
    for (int rank = 0; rank < pp; ++rank) {
      Done& own = done[rank];
      const int inputs = rank == 0 ? micro_batches : before[rank - 1].forward;
      const int gradients = rank == pp - 1 ? own.forward : before[rank + 1].input;
      if (own.forward < inputs && own.forward - own.input < pp - rank && own.forward - own.weight < pp)
        ranks[rank].push_back({forward, own.forward++, 0});
      else if (own.input < gradients) ranks[rank].push_back({backward_input, own.input++, 0});
      else if (own.weight < own.input) ranks[rank].push_back({backward_weight, own.weight++, 0});
    }
  }
  return ranks;
}

// ---- messages ----

/// A receive stands right before what needs it, a send right after what makes it. Between two ranks that keeps messages
/// in order, even where interleaved sends activations and gradients the same way (pp = 2): what one rank makes in one
/// turn of forward and backward, the other needs in one turn, in which the forward comes first too.
void add_messages(Schedule& schedule) {
  for (int rank = 0; rank < schedule.pp; ++rank) {
    std::vector<Action> actions;
    for (const Action& action : schedule.ranks[rank]) {
      const int stage = schedule.stage(rank, action.chunk);
      const bool has_previous = stage > 0, has_next = stage + 1 < schedule.stages();
      const bool gradient = action.kind == backward || action.kind == backward_input;
      const auto add = [&](ActionKind kind) { actions.push_back({kind, action.micro_batch, action.chunk}); };
      if (action.kind == forward && has_previous) add(receive_forward);
      if (gradient && has_next) add(receive_backward);
      actions.push_back(action);
      if (action.kind == forward && has_next) add(send_forward);
      if (gradient && has_previous) add(send_backward);
    }
    schedule.ranks[rank] = std::move(actions);
  }
}

}  // namespace

void check_schedule(const std::string& name, int64_t pp, int64_t virtual_stages, int64_t micro_batches) {
  require(std::ranges::find(kNames, name) != kNames.end(), ErrorKind::kUsage,
          "parallel.schedule = \"{}\" is not one of {}", name, fmt::join(kNames, ", "));
  require(pp >= 1, ErrorKind::kUsage, "parallel.pp = {} must be at least 1", pp);
  require(virtual_stages >= 1, ErrorKind::kUsage, "parallel.virtual_stages = {} must be at least 1", virtual_stages);
  require(micro_batches >= 1, ErrorKind::kUsage, "parallel.schedule = \"{}\" of {} micro-batches: at least 1 is needed",
          name, micro_batches);
  require(virtual_stages == 1 || name == "interleaved", ErrorKind::kUsage,
          "parallel.virtual_stages = {} needs parallel.schedule = \"interleaved\", not \"{}\"", virtual_stages, name);
  require(virtual_stages == 1 || pp > 1, ErrorKind::kUsage,
          "parallel.virtual_stages = {} needs parallel.pp of at least 2, not 1", virtual_stages);
  require(
      name != "interleaved" || micro_batches % pp == 0, ErrorKind::kUsage,
      "parallel.schedule = \"interleaved\" runs micro-batches in groups of parallel.pp = {}, so a step cannot have {}; "
      "the nearest number is {}",
      pp, micro_batches, std::max<int64_t>(1, (micro_batches + pp / 2) / pp) * pp);
}

Schedule make_schedule(const std::string& name, int pp, int virtual_stages, int micro_batches) {
  check_schedule(name, pp, virtual_stages, micro_batches);
  Schedule schedule{name, pp, virtual_stages, micro_batches, {}};
  if (name == "zero_bubble") schedule.ranks = zero_bubble(pp, micro_batches);
  else
    for (int rank = 0; rank < pp; ++rank)
      schedule.ranks.push_back(alternate(schedule, warmup_forwards(schedule, rank)));
  add_messages(schedule);
  return schedule;
}

}  // namespace optimus
