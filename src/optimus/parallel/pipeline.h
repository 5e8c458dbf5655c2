// The executor of pipeline schedules: runs a rank's list of actions over its stages. What a micro-batch in flight keeps
// lies in an arena of its own (a slot), so memory is the schedule's number of slots times the largest. Slots are used in
// turn, each only when the gradient that was sent from it has been received; see slots_needed().
#pragma once

#include <deque>
#include <functional>

#include "optimus/comm/communicator.h"
#include "optimus/model/stage.h"
#include "optimus/parallel/schedule.h"

namespace optimus {

class Pipeline {
 public:
  /// One slot a micro-batch in flight; capacity in bytes, -1 on a dry device. `stages`: this rank's chunks, first to last.
  Pipeline(const Schedule& schedule, std::vector<Stage> stages, Communicator& pp, Device& device,
           int64_t slot_capacity);

  const std::vector<Stage>& stages() const { return stages_; }
  const Schedule& schedule() const { return schedule_; }
  /// Called before every action of run(), for traces; may be empty.
  std::function<void(const Action&)> on_action;

  /// Makes a micro-batch's context: where it keeps what it saves and defers, and whether its gradients are the first.
  using MakeContext = std::function<Context(Arena& saved, Arena* deferred, int micro_batch)>;
  using MicroBatchOf = std::function<MicroBatch(int micro_batch)>;

  /// Forward and backward of all micro-batches.
  void run(const MakeContext& context, const MicroBatchOf& batch, const LossTerms& terms);
  /// Lets messages under way advance; for transports that do so only when called.
  void progress();

  /// One batch through all stages, forward only; logits of the last stage go to `sink`.
  void infer(const MakeContext& context, const MicroBatch& batch, const LossTerms& terms, const LogitsSink& sink,
             std::vector<KvCache>* caches = nullptr);

  int64_t slots() const { return int64_t(slots_.size()); }
  int64_t slot_peak() const;
  /// The dry slot with the largest peak.
  const Arena& largest_slot() const;

 private:
  struct InFlight {
    int chunk = -1, micro_batch = -1;  ///< -1: free
    std::unique_ptr<Arena> arena;
    StageSaved saved;
    Pending sends[4];  ///< what the neighbours may still be reading
  };

  InFlight& slot_of(const Action& action);
  InFlight& begin(const Action& action, const MakeContext& context, const MicroBatch& batch);
  void release(InFlight& slot);
  int stage_of(int chunk) const { return schedule_.stage(pp_.rank(), chunk); }
  void send(const Boundary& boundary, int to_stage, Pending* pending);
  void receive(const Boundary& boundary, int from_stage);

  Schedule schedule_;
  std::vector<Stage> stages_;
  Communicator& pp_;
  std::vector<InFlight> slots_;
  std::deque<InFlight*> free_;  ///< in the order in which they were given back
};

}  // namespace optimus
