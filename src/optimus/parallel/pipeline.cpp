#include "optimus/parallel/pipeline.h"

namespace optimus {

Pipeline::Pipeline(const Schedule& schedule, std::vector<Stage> stages, Communicator& pp, Device& device,
                   int64_t slot_capacity)
    : schedule_(schedule), stages_(std::move(stages)), pp_(pp) {
  const std::string wrong = check(schedule);
  expects(wrong.empty(), "schedule {}: {}", schedule.name, wrong);
  slots_.resize(size_t(slots_needed(schedule)[size_t(pp.rank())]));
  for (InFlight& slot : slots_) {
    slot.arena = std::make_unique<Arena>(device, "saved", slot_capacity);
    free_.push_back(&slot);
  }
}

// ---- slots ----

Pipeline::InFlight& Pipeline::slot_of(const Action& action) {
  for (InFlight& slot : slots_)
    if (slot.chunk == action.chunk && slot.micro_batch == action.micro_batch) return slot;
  expects(false, "schedule {}: micro-batch {} of chunk {} is not in flight", schedule_.name, action.micro_batch,
          action.chunk);
  return slots_.front();
}

Pipeline::InFlight& Pipeline::begin(const Action& action, const MakeContext& context, const MicroBatch& batch) {
  expects(!free_.empty(), "schedule {}: more micro-batches in flight than its {} slots", schedule_.name, slots_.size());
  InFlight& slot = *free_.front();
  free_.pop_front();
  for (Pending& pending : slot.sends) finish(pending);
  slot.chunk = action.chunk;
  slot.micro_batch = action.micro_batch;
  slot.arena->reset();
  Context c = context(*slot.arena, nullptr, action.micro_batch);
  stages_[size_t(action.chunk)].begin(c, batch, slot.saved);
  return slot;
}

void Pipeline::release(InFlight& slot) {
  slot.chunk = slot.micro_batch = -1;
  free_.push_back(&slot);
}

void Pipeline::progress() {
  for (InFlight& slot : slots_)
    for (Pending& pending : slot.sends)
      if (pending) pending->progress();
}

int64_t Pipeline::slot_peak() const { return largest_slot().peak(); }

const Arena& Pipeline::largest_slot() const {
  return *std::max_element(slots_.begin(), slots_.end(), [](const InFlight& a, const InFlight& b) {
            return a.arena->peak() < b.arena->peak();
          })->arena;
}

// ---- messages ----

// Between two ranks messages are received in the order in which they are sent (see check()), and with a stream comes its
// balance.

void Pipeline::send(const Boundary& boundary, int to_stage, Pending* pending) {
  const int to = to_stage % schedule_.pp;
  pending[0] = pp_.start_send(boundary.x_TD, to);
  if (boundary.balance) pending[1] = pp_.start_send(boundary.balance, to);
}

void Pipeline::receive(const Boundary& boundary, int from_stage) {
  const int from = from_stage % schedule_.pp;
  pp_.start_receive(boundary.x_TD, from)->wait();
  if (boundary.balance) pp_.start_receive(boundary.balance, from)->wait();
}

// ---- the executor ----

void Pipeline::run(const MakeContext& context, const MicroBatchOf& batch, const LossTerms& terms) {
  const bool split = schedule_.split_backward();
  for (const Action& action : schedule_.ranks[size_t(pp_.rank())]) {
    if (on_action) on_action(action);
    const Stage& stage = stages_[size_t(action.chunk)];
    const int number = stage_of(action.chunk), m = action.micro_batch;
    const MicroBatch part = batch(m);
    const auto context_of = [&](InFlight& slot) { return context(*slot.arena, split ? slot.arena.get() : nullptr, m); };
    switch (action.kind) {
      case ActionKind::receive_forward: receive(begin(action, context, part).saved.input, number - 1); break;
      case ActionKind::forward: {
        InFlight& slot = number == 0 ? begin(action, context, part) : slot_of(action);
        Context c = context_of(slot);
        stage.forward(c, part, terms, slot.saved);
        break;
      }
      case ActionKind::send_forward: {
        InFlight& slot = slot_of(action);
        send(slot.saved.output, number + 1, slot.sends);
        break;
      }
      case ActionKind::receive_backward: receive(slot_of(action).saved.output_gradient, number + 1); break;
      case ActionKind::backward: {
        InFlight& slot = slot_of(action);
        Context c = context_of(slot);
        stage.backward(c, part, terms.scales, slot.saved);
        if (number == 0) release(slot);
        break;
      }
      case ActionKind::backward_input: {
        InFlight& slot = slot_of(action);
        Context c = context_of(slot);
        stage.backward_input(c, part, terms.scales, slot.saved);
        break;
      }
      case ActionKind::send_backward: {
        InFlight& slot = slot_of(action);
        send(slot.saved.input_gradient, number - 1, slot.sends + 2);
        if (!split) release(slot);
        break;
      }
      case ActionKind::backward_weight: {
        InFlight& slot = slot_of(action);
        Context c = context_of(slot);
        stage.backward_weight(c, part, slot.saved);
        release(slot);
        break;
      }
    }
  }
  for (InFlight& slot : slots_)
    for (Pending& pending : slot.sends) finish(pending);
}

void Pipeline::infer(const MakeContext& context, const MicroBatch& batch, const LossTerms& terms,
                     const LogitsSink& sink, std::vector<KvCache>* caches) {
  Arena& arena = *slots_.front().arena;
  KvCache* cache = caches ? caches->data() : nullptr;
  for (int chunk = 0; chunk < int(stages_.size()); ++chunk) {
    const Stage& stage = stages_[size_t(chunk)];
    const int number = stage_of(chunk);
    arena.reset();
    Context c = context(arena, nullptr, 0);
    StageSaved saved;
    stage.begin(c, batch, saved);
    if (number > 0) receive(saved.input, number - 1);
    stage.infer(c, batch, terms, sink, saved, cache);
    if (cache) cache += stage.placement().layers;
    Pending sends[2];
    if (number + 1 < schedule_.stages()) send(saved.output, number + 1, sends);
    for (Pending& pending : sends) finish(pending);
  }
}

}  // namespace optimus
