// Every schedule, over a range of sizes: it is sound, its time and memory are the published ones, and the checker sees
// whatever is broken in it.
#include "optimus/parallel/schedule.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <random>
#include <utility>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "optimus/base/error.h"

namespace optimus {
namespace {

using enum ActionKind;

std::string title(const Schedule& s) {
  return fmt::format("{} pp {} virtual_stages {} micro_batches {}", s.name, s.pp, s.virtual_stages, s.micro_batches);
}

/// Whether make_schedule offers it.
bool offered(const std::string& name, int pp, int virtual_stages, int micro_batches) {
  if (name == "interleaved") return micro_batches % pp == 0 && (pp > 1 || virtual_stages == 1);
  return virtual_stages == 1;
}

void for_each_schedule(int max_pp, int max_virtual_stages, int max_micro_batches,
                       const std::function<void(const Schedule&)>& body) {
  for (const std::string name : {"gpipe", "1f1b", "interleaved", "zero_bubble"})
    for (int pp = 1; pp <= max_pp; ++pp)
      for (int virtual_stages = 1; virtual_stages <= max_virtual_stages; ++virtual_stages)
        for (int micro_batches = 1; micro_batches <= max_micro_batches; ++micro_batches) {
          if (!offered(name, pp, virtual_stages, micro_batches)) continue;
          const Schedule schedule = make_schedule(name, pp, virtual_stages, micro_batches);
          SCOPED_TRACE(title(schedule));
          body(schedule);
          if (testing::Test::HasFailure()) return;
        }
}

/// Of equal stages, forward 1 and backward 2 (1 + 1), messages free.
Timeline unit_timeline(const Schedule& schedule) {
  return simulate(schedule, std::vector<StageCost>(size_t(schedule.stages())));
}

int count(const Schedule& schedule, ActionKind kind) {
  int total = 0;
  for (const auto& actions : schedule.ranks) total += int(std::ranges::count(actions, kind, &Action::kind));
  return total;
}

// ---- generators ----

TEST(PipelineSchedule, AllAreSoundAndComplete) {
  int schedules = 0;
  for_each_schedule(8, 4, 17, [&](const Schedule& s) {
    ++schedules;
    ASSERT_EQ(check(s), "");
    const bool split = s.name == "zero_bubble";
    EXPECT_EQ(s.split_backward(), split);
    const int runs = s.stages() * s.micro_batches, messages = (s.stages() - 1) * s.micro_batches;
    EXPECT_EQ(count(s, forward), runs);
    EXPECT_EQ(count(s, backward), split ? 0 : runs);
    EXPECT_EQ(count(s, backward_input), split ? runs : 0);
    EXPECT_EQ(count(s, backward_weight), split ? runs : 0);
    for (const ActionKind kind : {send_forward, receive_forward, send_backward, receive_backward})
      EXPECT_EQ(count(s, kind), messages);
  });
  // Three schedules of 8 * 17 sizes, and interleaved: 17 / pp for each pp, for 4 virtual stages (1 where pp = 1).
  EXPECT_EQ(schedules, 3 * 8 * 17 + 17 + 4 * (8 + 5 + 4 + 3 + 2 + 2 + 2));
}

TEST(PipelineSchedule, LargeOnesAreSound) {
  for (const Schedule& s : {make_schedule("1f1b", 64, 1, 200), make_schedule("interleaved", 32, 4, 128),
                            make_schedule("interleaved", 2, 16, 64), make_schedule("zero_bubble", 48, 1, 150)})
    EXPECT_EQ(check(s), "") << title(s);
}

TEST(PipelineSchedule, OneForwardOneBackwardInFull) {
  const Schedule s = make_schedule("1f1b", 2, 1, 2);
  EXPECT_EQ(s.ranks[0], (std::vector<Action>{{forward, 0, 0},
                                             {send_forward, 0, 0},
                                             {forward, 1, 0},
                                             {send_forward, 1, 0},
                                             {receive_backward, 0, 0},
                                             {backward, 0, 0},
                                             {receive_backward, 1, 0},
                                             {backward, 1, 0}}));
  EXPECT_EQ(s.ranks[1], (std::vector<Action>{{receive_forward, 0, 0},
                                             {forward, 0, 0},
                                             {backward, 0, 0},
                                             {send_backward, 0, 0},
                                             {receive_forward, 1, 0},
                                             {forward, 1, 0},
                                             {backward, 1, 0},
                                             {send_backward, 1, 0}}));
}

TEST(PipelineSchedule, InterleavedWithOneChunkIsOneForwardOneBackward) {
  for (int pp = 1; pp <= 8; ++pp)
    for (int groups = 1; groups <= 3; ++groups)
      EXPECT_EQ(make_schedule("interleaved", pp, 1, pp * groups).ranks,
                make_schedule("1f1b", pp, 1, pp * groups).ranks);
}

TEST(PipelineSchedule, RefusesWhatItDoesNotOffer) {
  const auto expect_refused = [](const std::string& name, int pp, int virtual_stages, int micro_batches,
                                 const std::string& words) {
    try {
      make_schedule(name, pp, virtual_stages, micro_batches);
      ADD_FAILURE() << "no error about " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUsage);
      EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
  };
  expect_refused("2f2b", 2, 1, 4, "parallel.schedule = \"2f2b\"");
  expect_refused("1f1b", 0, 1, 4, "parallel.pp = 0");
  expect_refused("1f1b", 2, 0, 4, "parallel.virtual_stages = 0");
  expect_refused("1f1b", 2, 1, 0, "0 micro-batches");
  for (const std::string name : {"gpipe", "1f1b", "zero_bubble"})
    expect_refused(name, 2, 2, 4, "parallel.virtual_stages = 2 needs parallel.schedule = \"interleaved\"");
  expect_refused("interleaved", 1, 2, 4, "parallel.virtual_stages = 2 needs parallel.pp");
  expect_refused("interleaved", 4, 2, 1, "the nearest number is 4");
  expect_refused("interleaved", 4, 2, 9, "the nearest number is 8");
  expect_refused("interleaved", 4, 2, 11, "the nearest number is 12");
}

// ---- time ----

TEST(PipelineSchedule, BubbleOfEqualStages) {
  for_each_schedule(8, 4, 17, [](const Schedule& s) {
    const Timeline timeline = unit_timeline(s);
    const double m = s.micro_batches, work = 3 * m * s.virtual_stages, idle = s.pp - 1;
    for (const double busy : timeline.busy) EXPECT_EQ(busy, work);
    EXPECT_DOUBLE_EQ(timeline.bubble, 1 - work / timeline.seconds);
    if (s.name != "zero_bubble") {
      EXPECT_EQ(timeline.seconds, work + 3 * idle);
      EXPECT_NEAR(timeline.bubble, idle / (s.virtual_stages * m + idle), 1e-15);
    } else {
      // The last rank starts pp - 1 late and works 3 M. Or it ends its M input gradients, which rank 0 gets pp - 1
      // later and adds a weight gradient: no schedule is shorter. The first is the paper's bubble, (pp - 1) (F + B -
      // W).
      EXPECT_EQ(timeline.seconds, std::max(work + idle, idle + 2 * m + idle + 1));
      if (s.micro_batches >= s.pp) {
        EXPECT_EQ(timeline.seconds, work + idle);
      }
      if (s.pp > 1) {
        EXPECT_LT(timeline.bubble, unit_timeline(make_schedule("1f1b", s.pp, 1, s.micro_batches)).bubble);
      }
    }
  });
}

TEST(PipelineSchedule, MessagesTakeTime) {
  const StageCost cost{
      .forward = 1, .backward_input = 2, .backward_weight = 4, .send_forward = 0.5, .send_backward = 0.25};
  // Down and up the stages with one micro-batch; the last weight gradient of zero_bubble is rank 0's.
  EXPECT_EQ(simulate(make_schedule("1f1b", 3, 1, 1), {cost, cost, cost}).seconds, 3 * (1 + 6) + 2 * (0.5 + 0.25));
  EXPECT_EQ(simulate(make_schedule("zero_bubble", 3, 1, 1), {cost, cost, cost}).seconds,
            3 * (1 + 2) + 2 * (0.5 + 0.25) + 4);
  EXPECT_EQ(simulate(make_schedule("interleaved", 2, 2, 2), std::vector<StageCost>(4, cost)).busy,
            (std::vector<double>{28, 28}));
  // The sender's cost counts: forward 0, backward 1, no more than these two send.
  const StageCost dear_forward{.send_forward = 10, .send_backward = 1000},
      dear_backward{.send_forward = 1000, .send_backward = 20};
  EXPECT_EQ(simulate(make_schedule("gpipe", 2, 1, 1), {dear_forward, dear_backward}).seconds, 6 + 10 + 20);
}

/// Neither the busiest rank nor any micro-batch's way through all stages can be beaten.
TEST(PipelineSchedule, UnevenStages) {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> seconds(0.1, 3);
  for_each_schedule(6, 3, 12, [&](const Schedule& s) {
    std::vector<StageCost> costs(static_cast<size_t>(s.stages()));
    std::vector<double> busy(static_cast<size_t>(s.pp));
    double way = 0;
    for (int stage = 0; stage < s.stages(); ++stage) {
      StageCost& c = costs[size_t(stage)];
      c = {seconds(random), seconds(random), seconds(random), seconds(random), seconds(random)};
      busy[size_t(stage % s.pp)] += s.micro_batches * (c.forward + c.backward_input + c.backward_weight);
      way += c.forward + c.backward_input;
      if (stage + 1 < s.stages()) way += c.send_forward;
      if (stage > 0) way += c.send_backward;
    }
    const Timeline timeline = simulate(s, costs);
    for (int rank = 0; rank < s.pp; ++rank) EXPECT_NEAR(timeline.busy[size_t(rank)], busy[size_t(rank)], 1e-9);
    EXPECT_GE(timeline.seconds, std::ranges::max(busy) - 1e-9);
    EXPECT_GE(timeline.seconds, way - 1e-9);
    const double total = std::accumulate(busy.begin(), busy.end(), 0.0);
    EXPECT_NEAR(timeline.bubble, 1 - total / (s.pp * timeline.seconds), 1e-12);
    EXPECT_GE(timeline.bubble, -1e-12);
  });
}

TEST(PipelineSchedule, SimulationRefusesWhatItCannotRun) {
  Schedule s = make_schedule("1f1b", 2, 1, 2);
  EXPECT_THROW(simulate(s, std::vector<StageCost>(3)), std::logic_error);
  std::erase(s.ranks[0], Action{send_forward, 1, 0});
  EXPECT_THROW(simulate(s, std::vector<StageCost>(2)), std::logic_error);
}

// ---- memory ----

TEST(PipelineSchedule, SlotsOfSavedActivations) {
  for_each_schedule(8, 4, 17, [](const Schedule& s) {
    const std::vector<int> slots = slots_needed(s);
    ASSERT_EQ(slots.size(), size_t(s.pp));
    for (int rank = 0; rank < s.pp; ++rank) {
      if (s.name == "gpipe") {
        EXPECT_EQ(slots[rank], s.micro_batches);
      } else if (s.name == "1f1b") {
        EXPECT_EQ(slots[rank], std::min(s.micro_batches, s.pp - rank));
      } else if (s.name == "zero_bubble") {
        EXPECT_LE(slots[rank], std::min(s.micro_batches, s.pp));
      } else {  // Megatron's warm-up, the one that runs, and a gradient on its way
        const int warm_up = (s.virtual_stages - 1) * s.pp + 2 * (s.pp - 1 - rank);
        EXPECT_LE(slots[rank], std::min(s.micro_batches * s.virtual_stages, warm_up + 2));
      }
    }
  });
}

TEST(PipelineSchedule, SlotsAreHeldFromReceiveToWeightGradient) {
  Schedule s = make_schedule("zero_bubble", 2, 1, 2);
  s.ranks[1] = {{receive_forward, 0, 0}, {forward, 0, 0},         {backward_input, 0, 0}, {send_backward, 0, 0},
                {receive_forward, 1, 0}, {backward_weight, 0, 0}, {forward, 1, 0},        {backward_input, 1, 0},
                {send_backward, 1, 0},   {backward_weight, 1, 0}};
  EXPECT_EQ(check(s), "");
  EXPECT_EQ(slots_needed(s)[1], 2);
  std::swap(s.ranks[1][4], s.ranks[1][5]);
  EXPECT_EQ(check(s), "");
  EXPECT_EQ(slots_needed(s)[1], 1);
}

/// The most micro-batches of a rank between their first and their last action at once.
int most_in_flight(const Schedule& s, int rank) {
  int held = 0, most = 0;
  for (const Action& action : s.ranks[rank]) {
    const bool first_stage = s.stage(rank, action.chunk) == 0;
    if (action.kind == (first_stage ? forward : receive_forward)) most = std::max(most, ++held);
    if (action.kind == (first_stage ? backward : send_backward)) --held;
  }
  return most;
}

// With two ranks in two chunks each, a rank that has sent a gradient back would wait for its slot while the other waits
// for the activation that it makes next.
TEST(PipelineSchedule, AGradientOnItsWayHoldsItsSlot) {
  const Schedule s = make_schedule("interleaved", 2, 2, 8);
  EXPECT_EQ(most_in_flight(s, 0), 5);
  EXPECT_EQ(most_in_flight(s, 1), 3);
  EXPECT_EQ(slots_needed(s), (std::vector<int>{6, 4}));
}

// ---- the checker ----

/// Small ones with all that there is: a rank's first, middle and last stage, both forms of backward, one neighbour for
/// both directions.
std::vector<Schedule> samples() {
  return {make_schedule("gpipe", 3, 1, 3),       make_schedule("1f1b", 3, 1, 4),
          make_schedule("1f1b", 1, 1, 3),        make_schedule("interleaved", 2, 2, 4),
          make_schedule("interleaved", 3, 2, 6), make_schedule("zero_bubble", 3, 1, 5)};
}

/// Every sample after every change to one rank's list that `mutate` makes at (rank, place); it returns false for none.
void expect_all_caught(const std::function<bool(std::vector<Action>&, size_t place)>& mutate) {
  int mutants = 0;
  for (const Schedule& sample : samples())
    for (size_t rank = 0; rank < sample.ranks.size(); ++rank)
      for (size_t place = 0; place < sample.ranks[rank].size(); ++place) {
        Schedule mutant = sample;
        if (!mutate(mutant.ranks[rank], place)) continue;
        ++mutants;
        EXPECT_NE(check(mutant), "") << title(sample) << ", rank " << rank << ", action " << place;
      }
  EXPECT_GT(mutants, 30);
}

TEST(PipelineCheck, LostAction) {
  expect_all_caught([](std::vector<Action>& actions, size_t place) {
    actions.erase(actions.begin() + std::ptrdiff_t(place));
    return true;
  });
}

TEST(PipelineCheck, RepeatedAction) {
  expect_all_caught([](std::vector<Action>& actions, size_t place) {
    actions.insert(actions.begin() + std::ptrdiff_t(place), actions[place]);
    return true;
  });
  expect_all_caught([](std::vector<Action>& actions, size_t place) {
    actions.push_back(actions[place]);
    return true;
  });
}

TEST(PipelineCheck, AnotherActionInItsPlace) {
  for (int kind = 0; kind <= int(receive_backward); ++kind)
    expect_all_caught([kind](std::vector<Action>& actions, size_t place) {
      return std::exchange(actions[place].kind, ActionKind(kind)) != ActionKind(kind);
    });
  for (const int step : {-1, 1}) {
    expect_all_caught([step](std::vector<Action>& actions, size_t place) {
      actions[place].micro_batch += step;
      return true;
    });
    expect_all_caught([step](std::vector<Action>& actions, size_t place) {
      actions[place].chunk += step;
      return true;
    });
  }
}

/// Whether `then` needs what `first` gives, for the same micro-batch in the same chunk.
bool depends(ActionKind first, ActionKind then) {
  const auto is_any = [](ActionKind kind, std::initializer_list<ActionKind> kinds) {
    return std::ranges::find(kinds, kind) != kinds.end();
  };
  switch (first) {
    case receive_forward: return is_any(then, {forward, send_forward, backward, backward_input, backward_weight});
    case forward: return is_any(then, {send_forward, backward, backward_input, backward_weight});
    case receive_backward: return is_any(then, {backward, backward_input, backward_weight, send_backward});
    case backward: return then == send_backward;
    case backward_input: return is_any(then, {backward_weight, send_backward});
    default: return false;
  }
}

TEST(PipelineCheck, SwappedDependentActions) {
  for (size_t distance = 1; distance < 12; ++distance)
    expect_all_caught([distance](std::vector<Action>& actions, size_t place) {
      if (place + distance >= actions.size()) return false;
      Action &first = actions[place], &then = actions[place + distance];
      if (first.chunk != then.chunk) return false;
      const bool ascends = first.kind == then.kind;
      if (!ascends && !(first.micro_batch == then.micro_batch && depends(first.kind, then.kind))) return false;
      std::swap(first, then);
      return true;
    });
}

/// Between the two ranks of pp = 2, activations and gradients share a channel. A receive that comes too early, or a
/// send that comes too late, leaves each rank in order by itself.
TEST(PipelineCheck, MessagesInAnotherOrder) {
  const Schedule sample = make_schedule("interleaved", 2, 3, 6);
  const auto move = [](std::vector<Action>& actions, size_t from, size_t to) {
    const Action action = actions[from];
    actions.erase(actions.begin() + std::ptrdiff_t(from));
    actions.insert(actions.begin() + std::ptrdiff_t(to), action);
  };
  int mutants = 0, seen_in_channel_only = 0;
  for (size_t rank = 0; rank < 2; ++rank)
    for (const bool sends : {false, true}) {
      const std::vector<Action>& actions = sample.ranks[rank];
      std::vector<size_t> places;  // of the messages
      for (size_t place = 0; place < actions.size(); ++place) {
        const ActionKind kind = actions[place].kind;
        if (sends ? kind == send_forward || kind == send_backward : kind == receive_forward || kind == receive_backward)
          places.push_back(place);
      }
      for (size_t i = 0; i + 1 < places.size(); ++i) {
        Schedule mutant = sample;
        if (sends) move(mutant.ranks[rank], places[i], places[i + 1]);
        else move(mutant.ranks[rank], places[i + 1], places[i]);
        const std::string wrong = check(mutant);
        EXPECT_NE(wrong, "") << "rank " << rank << (sends ? ", send " : ", receive ") << i;
        ++mutants;
        seen_in_channel_only += wrong.find(" sends it ") != std::string::npos;
      }
    }
  EXPECT_EQ(mutants, 2 * (5 * 6 + 5 * 6) - 4);  // 5 borders between stages, both ways, a send and a receive each
  EXPECT_GT(seen_in_channel_only, mutants / 2);
}

/// Each rank alone is in order and each channel too, but rank 0 wants a gradient before it sends what that gradient
/// needs.
TEST(PipelineCheck, CyclicWait) {
  Schedule s = make_schedule("gpipe", 2, 1, 2);
  s.ranks[0] = {{forward, 0, 0}, {send_forward, 0, 0}, {receive_backward, 0, 0}, {backward, 0, 0},
                {forward, 1, 0}, {send_forward, 1, 0}, {receive_backward, 1, 0}, {backward, 1, 0}};
  EXPECT_EQ(check(s), "rank 0 waits for ever in receive_backward of micro-batch 0 in chunk 0");
  s.ranks[1] = make_schedule("1f1b", 2, 1, 2).ranks[1];
  EXPECT_EQ(check(s), "");
}

TEST(PipelineCheck, Sentences) {
  Schedule s = make_schedule("1f1b", 2, 1, 2);
  std::erase(s.ranks[1], Action{send_backward, 1, 0});
  EXPECT_EQ(check(s), "rank 1 lacks send_backward of micro-batch 1 in chunk 0");

  s = make_schedule("1f1b", 2, 1, 2);
  s.ranks[1].push_back({send_forward, 0, 0});
  EXPECT_EQ(check(s), "rank 1 has send_forward of micro-batch 0 in chunk 0, which is not for stage 1 of 2");
  s.ranks[1].back() = {backward_weight, 0, 0};
  EXPECT_NE(check(s), "") << "a backward in one piece and one in two";

  s = make_schedule("1f1b", 2, 1, 2);
  s.ranks.pop_back();
  EXPECT_EQ(check(s), "there are actions for 1 ranks, not 2");
  s.pp = 0;
  EXPECT_NE(check(s), "");
  EXPECT_NE(check(Schedule{"", 1, 2, 1, {{}}}), "") << "virtual stages of a single rank";
}

}  // namespace
}  // namespace optimus
