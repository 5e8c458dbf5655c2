// Checks and simulates pipeline schedules. Both play a schedule: every rank goes through its list, a send is under way
// at once and a receive waits for its message.
#include "optimus/parallel/schedule.h"

#include <algorithm>
#include <array>
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
};

/// Runs every rank as far as it gets. The order of the loop does not matter: a rank waits for a certain message, never
/// for the first of several.
Playback play(const Schedule& schedule, const std::vector<StageCost>& costs) {
  const size_t pp = schedule.ranks.size();
  Playback played{std::vector<size_t>(pp), std::vector<double>(pp), std::vector<double>(pp)};
  std::vector<PerAction<std::optional<double>>> arrivals(pp, {schedule, std::nullopt});  // of the receiver's receives
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
    switch (action.kind) {
      case forward: compute(cost.forward); break;
      case backward: compute(cost.backward_input + cost.backward_weight); break;
      case backward_input: compute(cost.backward_input); break;
      case backward_weight: compute(cost.backward_weight); break;
      case send_forward: send(cost.send_forward); break;
      case send_backward: send(cost.send_backward); break;
      case receive_forward:
      case receive_backward:
        const std::optional<double> arrival = arrivals[rank][action];
        if (!arrival) return false;
        now = std::max(now, *arrival);
    }
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
  const Playback played = play(schedule, std::vector<StageCost>(size_t(schedule.stages())));
  for (int rank = 0; rank < schedule.pp; ++rank)
    if (const std::vector<Action>& actions = schedule.ranks[rank]; played.done[rank] < actions.size())
      return fmt::format("rank {} waits for ever in {}", rank, describe(actions[played.done[rank]]));
  return "";
}

}  // namespace

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
  const Playback played = play(schedule, costs);
  for (int rank = 0; rank < schedule.pp; ++rank)
    expects(played.done[rank] == schedule.ranks[rank].size(), "rank {} of schedule {} waits for ever", rank,
            schedule.name);
  const double seconds = std::ranges::max(played.seconds);
  const double busy = std::accumulate(played.busy.begin(), played.busy.end(), 0.0);
  return {seconds, played.busy, seconds > 0 ? 1 - busy / (schedule.pp * seconds) : 0};
}

std::vector<int> slots_needed(const Schedule& schedule, int rank) {
  const ActionKind last = schedule.split_backward() ? backward_weight : backward;
  std::vector<int> held(static_cast<size_t>(schedule.virtual_stages)), most = held;
  for (const auto& [kind, micro_batch, chunk] : schedule.ranks[rank]) {
    const ActionKind first = schedule.stage(rank, chunk) == 0 ? forward : receive_forward;
    if (kind == first) most[chunk] = std::max(most[chunk], ++held[chunk]);
    if (kind == last) --held[chunk];
  }
  return most;
}

}  // namespace optimus
