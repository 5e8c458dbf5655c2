// Checks and simulates pipeline schedules. Both play a schedule: every rank goes through its list, a send is under way
// at once and a receive waits for its message.
#include "optimus/parallel/schedule.h"

#include <algorithm>
#include <array>
#include <deque>
#include <numeric>
#include <optional>

#include <fmt/format.h>

#include "optimus/base/error.h"

namespace optimus {
namespace {

using enum ActionKind;

constexpr std::array kKindNames = {"forward",      "backward",        "backward_input", "backward_weight",
                                   "send_forward", "receive_forward", "send_backward",  "receive_backward"};
constexpr int kKinds = int(kKindNames.size());

std::string describe(const Action& action) {
  return fmt::format("{} of micro-batch {} in chunk {}", kKindNames[size_t(action.kind)], action.micro_batch,
                     action.chunk);
}

/// A value for every action that a rank may have.
template <typename T>
class PerAction {
 public:
  PerAction(const Schedule& schedule, T initial)
      : chunks_(size_t(schedule.virtual_stages)),
        micro_batches_(size_t(schedule.micro_batches)),
        values_(size_t(kKinds) * chunks_ * micro_batches_, initial) {}
  typename std::vector<T>::reference operator[](const Action& action) {
    return values_[(size_t(action.kind) * chunks_ + size_t(action.chunk)) * micro_batches_ +
                   size_t(action.micro_batch)];
  }

 private:
  size_t chunks_, micro_batches_;
  std::vector<T> values_;
};

/// Whether a stage has the neighbour that such a send or receive is for.
bool has_neighbour(const Schedule& schedule, int stage, ActionKind kind) {
  const bool next = kind == send_forward || kind == receive_backward;
  return next ? stage + 1 < schedule.stages() : stage > 0;
}

/// A send or receive as the rank at its other end has it.
struct Counterpart {
  int rank;
  Action action;
};
Counterpart counterpart(const Schedule& schedule, int rank, const Action& action) {
  const auto at = [&](int stage, ActionKind kind) {
    return Counterpart{stage % schedule.pp, {kind, action.micro_batch, stage / schedule.pp}};
  };
  const int stage = schedule.stage(rank, action.chunk);
  switch (action.kind) {
    case send_forward: return at(stage + 1, receive_forward);
    case receive_forward: return at(stage - 1, send_forward);
    case send_backward: return at(stage - 1, receive_backward);
    default: return at(stage + 1, send_backward);
  }
}

/// [sender][receiver] the messages of the one to the other, in order, as the receiver's actions.
using Channels = std::vector<std::vector<std::vector<Action>>>;

Channels make_channels(int pp) { return Channels(size_t(pp), std::vector<std::vector<Action>>(size_t(pp))); }

// ---- playing ----

struct Playback {
  std::vector<size_t> done;     // [pp] actions: less than all where a rank waits for ever
  std::vector<double> seconds;  // [pp] when the last of them ended
  std::vector<double> busy;     // [pp]
  std::vector<bool> no_slot;    // [pp] it waits for a slot
};

/// The first and the last action of a micro-batch in a chunk: between them it holds a slot.
ActionKind first_action(const Schedule& schedule, int rank, int chunk) {
  return schedule.stage(rank, chunk) == 0 ? forward : receive_forward;
}
ActionKind last_action(const Schedule& schedule, int rank, int chunk) {
  if (schedule.split_backward()) return backward_weight;
  return schedule.stage(rank, chunk) == 0 ? backward : send_backward;
}

/// Runs every rank as far as it gets with `slots` sets of activations. The order of the loop does not matter: a rank
/// waits for a certain message or slot, never for the first of several.
///
/// A slot also holds the gradient that is sent to the stage before; it is free when that has been received. Slots are used
/// in turn: the one given back first is taken first.
Playback play(const Schedule& schedule, const std::vector<StageCost>& costs, const std::vector<int>& slots) {
  const size_t pp = schedule.ranks.size();
  Playback played{std::vector<size_t>(pp), std::vector<double>(pp), std::vector<double>(pp), std::vector<bool>(pp)};
  std::vector<PerAction<std::optional<double>>> arrivals(pp, {schedule, std::nullopt});  // of the receiver's receives
  std::vector<PerAction<bool>> received(pp, {schedule, false});                          // of the receiver's receives
  std::vector<std::deque<std::optional<Counterpart>>> free(pp);  // the receive that each slot still waits for
  for (size_t rank = 0; rank < pp; ++rank) free[rank].resize(size_t(slots[rank]));

  const auto take_slot = [&](int rank) {
    std::deque<std::optional<Counterpart>>& queue = free[rank];
    if (queue.empty() || (queue.front() && !received[queue.front()->rank][queue.front()->action])) return false;
    queue.pop_front();
    return true;
  };
  const auto give_back_slot = [&](int rank, const Action& action) {
    const Action sent{send_backward, action.micro_batch, action.chunk};
    const bool sends = schedule.stage(rank, action.chunk) > 0;
    free[rank].push_back(sends ? std::optional(counterpart(schedule, rank, sends ? sent : action)) : std::nullopt);
  };
  const auto act = [&](int rank, const Action& action) {
    const StageCost& cost = costs[schedule.stage(rank, action.chunk)];
    double& now = played.seconds[rank];
    const auto compute = [&](double seconds) {
      now += seconds;
      played.busy[rank] += seconds;
    };
    const auto send = [&](double seconds) {
      const auto [receiver, receive] = counterpart(schedule, rank, action);
      arrivals[receiver][receive] = now + seconds;
    };
    const bool receives = action.kind == receive_forward || action.kind == receive_backward;
    const std::optional<double> arrival = receives ? arrivals[rank][action] : std::nullopt;
    played.no_slot[rank] = false;
    if (receives && !arrival) return false;
    if (action.kind == first_action(schedule, rank, action.chunk) && !take_slot(rank)) {
      played.no_slot[rank] = true;
      return false;
    }
    switch (action.kind) {
      case forward: compute(cost.forward); break;
      case backward: compute(cost.backward_input + cost.backward_weight); break;
      case backward_input: compute(cost.backward_input); break;
      case backward_weight: compute(cost.backward_weight); break;
      case send_forward: send(cost.send_forward); break;
      case send_backward: send(cost.send_backward); break;
      case receive_forward:
      case receive_backward: now = std::max(now, *arrival); received[rank][action] = true;
    }
    if (action.kind == last_action(schedule, rank, action.chunk)) give_back_slot(rank, action);
    return true;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int rank = 0; rank < schedule.pp; ++rank) {
      const std::vector<Action>& actions = schedule.ranks[rank];
      for (size_t& done = played.done[rank]; done < actions.size() && act(rank, actions[done]); ++done) moved = true;
    }
  }
  return played;
}

/// More slots than micro-batches and chunks never help.
std::vector<int> enough_slots(const Schedule& schedule) {
  return std::vector<int>(schedule.ranks.size(), schedule.micro_batches * schedule.virtual_stages);
}

// ---- checks: each relies on those before it and returns a sentence, or "" ----

std::string check_sizes(const Schedule& schedule) {
  const auto& [name, pp, virtual_stages, micro_batches, ranks] = schedule;
  if (pp < 1 || virtual_stages < 1 || micro_batches < 1)
    return fmt::format("pp = {}, virtual_stages = {} and micro_batches = {} must be at least 1", pp, virtual_stages,
                       micro_batches);
  if (pp == 1 && virtual_stages > 1) return fmt::format("a single rank has {} virtual stages", virtual_stages);
  if (ranks.size() != size_t(pp)) return fmt::format("there are actions for {} ranks, not {}", ranks.size(), pp);
  for (int rank = 0; rank < pp; ++rank)
    for (const Action& action : ranks[rank])
      if (action.micro_batch < 0 || action.micro_batch >= micro_batches || action.chunk < 0 ||
          action.chunk >= virtual_stages)
        return fmt::format("rank {} has {}, of {} micro-batches and {} chunks", rank, describe(action), micro_batches,
                           virtual_stages);
  return "";
}

/// A rank has each of its actions once and no other, in an order in which what each needs comes first and
/// micro-batches ascend.
std::string check_rank(const Schedule& schedule, int rank) {
  const std::vector<Action>& actions = schedule.ranks[rank];
  PerAction<std::optional<size_t>> places(schedule, std::nullopt);
  for (size_t place = 0; place < actions.size(); ++place) {
    if (places[actions[place]]) return fmt::format("rank {} has {} twice", rank, describe(actions[place]));
    places[actions[place]] = place;
  }

  const bool split = schedule.split_backward();
  const ActionKind gradient = split ? backward_input : backward;
  const std::array<std::array<ActionKind, 2>, 6> orders = {{{receive_forward, forward},
                                                            {forward, send_forward},
                                                            {forward, gradient},
                                                            {receive_backward, gradient},
                                                            {gradient, send_backward},
                                                            {backward_input, backward_weight}}};
  for (int chunk = 0; chunk < schedule.virtual_stages; ++chunk) {
    const int stage = schedule.stage(rank, chunk);
    const auto belongs = [&](ActionKind kind) {
      switch (kind) {
        case forward: return true;
        case backward: return !split;
        case backward_input:
        case backward_weight: return split;
        default: return has_neighbour(schedule, stage, kind);
      }
    };
    for (int micro_batch = 0; micro_batch < schedule.micro_batches; ++micro_batch) {
      for (int k = 0; k < kKinds; ++k) {
        const Action action{ActionKind(k), micro_batch, chunk};
        if (!places[action] && belongs(action.kind)) return fmt::format("rank {} lacks {}", rank, describe(action));
        if (places[action] && !belongs(action.kind))
          return fmt::format("rank {} has {}, which is not for stage {} of {}{}", rank, describe(action), stage,
                             schedule.stages(), split ? " with split backward" : "");
        const Action before{ActionKind(k), micro_batch - 1, chunk};
        if (micro_batch > 0 && places[before] > places[action])
          return fmt::format("rank {} has {} before that of micro-batch {}", rank, describe(action), micro_batch - 1);
      }
      for (const auto& [first, then] : orders)
        if (belongs(first) && belongs(then) && places[{first, micro_batch, chunk}] > places[{then, micro_batch, chunk}])
          return fmt::format("rank {} has {} before its {}", rank, describe({then, micro_batch, chunk}),
                             kKindNames[size_t(first)]);
    }
  }
  return "";
}

std::string check_channels(const Schedule& schedule) {
  Channels sent = make_channels(schedule.pp), received = make_channels(schedule.pp);
  for (int rank = 0; rank < schedule.pp; ++rank)
    for (const Action& action : schedule.ranks[rank]) {
      if (action.kind == send_forward || action.kind == send_backward) {
        const auto [receiver, receive] = counterpart(schedule, rank, action);
        sent[rank][receiver].push_back(receive);
      } else if (action.kind == receive_forward || action.kind == receive_backward) {
        received[counterpart(schedule, rank, action).rank][rank].push_back(action);
      }
    }
  for (int from = 0; from < schedule.pp; ++from)
    for (int to = 0; to < schedule.pp; ++to) {
      const auto [s, r] = std::ranges::mismatch(sent[from][to], received[from][to]);
      if (s != sent[from][to].end())
        return fmt::format("rank {} has {} where rank {} sends it what is for {}", to, describe(*r), from,
                           describe(*s));
    }
  return "";
}

std::string check_progress(const Schedule& schedule) {
  const Playback played = play(schedule, std::vector<StageCost>(size_t(schedule.stages())), enough_slots(schedule));
  for (int rank = 0; rank < schedule.pp; ++rank)
    if (const std::vector<Action>& actions = schedule.ranks[rank]; played.done[rank] < actions.size())
      return fmt::format("rank {} waits for ever in {}", rank, describe(actions[played.done[rank]]));
  return "";
}

}  // namespace

std::string_view name_of(ActionKind kind) { return kKindNames[size_t(kind)]; }

bool Schedule::split_backward() const {
  return std::ranges::any_of(ranks, [](const std::vector<Action>& actions) {
    return std::ranges::any_of(
        actions, [](ActionKind kind) { return kind == backward_input || kind == backward_weight; }, &Action::kind);
  });
}

std::string check(const Schedule& schedule) {
  std::string wrong = check_sizes(schedule);
  for (int rank = 0; wrong.empty() && rank < schedule.pp; ++rank) wrong = check_rank(schedule, rank);
  if (wrong.empty()) wrong = check_channels(schedule);
  if (wrong.empty()) wrong = check_progress(schedule);
  return wrong;
}

Timeline simulate(const Schedule& schedule, const std::vector<StageCost>& costs) {
  expects(costs.size() == size_t(schedule.stages()), "costs of {} stages for a schedule of {}", costs.size(),
          schedule.stages());
  const Playback played = play(schedule, costs, enough_slots(schedule));
  for (int rank = 0; rank < schedule.pp; ++rank)
    expects(played.done[rank] == schedule.ranks[rank].size(), "rank {} of schedule {} waits for ever", rank,
            schedule.name);
  const double seconds = std::ranges::max(played.seconds);
  const double busy = std::accumulate(played.busy.begin(), played.busy.end(), 0.0);
  return {seconds, played.busy, seconds > 0 ? 1 - busy / (schedule.pp * seconds) : 0};
}

std::vector<int> slots_needed(const Schedule& schedule) {
  // At least as many as micro-batches are in flight at once; and more where a rank would wait for ever for one.
  std::vector<int> slots(schedule.ranks.size());
  for (int rank = 0; rank < schedule.pp; ++rank) {
    int held = 0;
    for (const Action& action : schedule.ranks[rank]) {
      if (action.kind == first_action(schedule, rank, action.chunk)) slots[rank] = std::max(slots[rank], ++held);
      if (action.kind == last_action(schedule, rank, action.chunk)) --held;
    }
  }
  const std::vector<StageCost> costs(size_t(schedule.stages()));
  for (;;) {
    const Playback played = play(schedule, costs, slots);
    bool waits = false;
    for (int rank = 0; rank < schedule.pp; ++rank)
      if (played.done[rank] < schedule.ranks[rank].size() && played.no_slot[rank]) {
        ++slots[rank];
        waits = true;
      }
    if (!waits) return slots;
  }
}

}  // namespace optimus
