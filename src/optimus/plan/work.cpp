#include "optimus/plan/work.h"

#include "optimus/parallel/placements.h"

namespace optimus {
namespace {

/// As few micro-batches as show everything: one that overwrites gradients, one that adds to them and reduces them.
RunConfig shortened(RunConfig config) {
  const int64_t few = config.parallel.schedule == "interleaved" ? config.mesh.pp : 2;
  if (config.micro_batches() > few) config.train.global_batch = few * config.train.micro_batch * config.mesh.dp;
  return config;
}

/// The messages that reduce gradients among those of a backward.
bool reduces_gradients(const MessageRecord& message) { return message.group == "dp" || message.group == "edp"; }

void append(Work& to, const OpRecord& op) { to.ops.push_back(op); }

// The end of a step: the reduction's rest, squares, the sums of all ranks, clipping, update, gathering.
void read_end(const Trace& trace, const Trace::Phase& phase, RankWork& rank) {
  for (size_t i = phase.first_op; i < trace.ops.size(); ++i)
    append(trace.ops[i].op == "adamw" ? rank.update : rank.norm, trace.ops[i]);
  bool agreed = false;
  for (size_t i = phase.first_message; i < trace.messages.size(); ++i) {
    const MessageRecord& message = trace.messages[i];
    const bool world = message.group == "world";
    agreed |= world;
    (world ? rank.norm.messages : agreed ? rank.gathers : rank.reduce.messages).push_back(message);
  }
}

RankWork read_trace(const Trace& trace, int last_micro_batch, int chunks) {
  RankWork rank;
  rank.chunks.resize(size_t(chunks));
  for (size_t i = 0; i < trace.phases.front().first_op; ++i) append(rank.begin, trace.ops[i]);
  for (size_t i = 0; i < trace.phases.front().first_message; ++i) rank.begin.messages.push_back(trace.messages[i]);

  for (size_t p = 0; p < trace.phases.size(); ++p) {
    const Trace::Phase& phase = trace.phases[p];
    if (!phase.action) {
      read_end(trace, phase, rank);
      break;
    }
    const auto& [kind, micro_batch, chunk] = *phase.action;
    if (micro_batch != last_micro_batch) continue;
    ChunkWork& work = rank.chunks[size_t(chunk)];
    Work* part = nullptr;
    std::vector<MessageRecord>* sends = nullptr;
    switch (kind) {
      case ActionKind::forward: part = &work.forward; break;
      case ActionKind::backward:
      case ActionKind::backward_input: part = &work.backward_input; break;
      case ActionKind::backward_weight: part = &work.backward_weight; break;
      case ActionKind::send_forward: sends = &work.send_forward; break;
      case ActionKind::send_backward: sends = &work.send_backward; break;
      case ActionKind::receive_forward:
      case ActionKind::receive_backward: continue;
    }
    const Trace::Phase& next = trace.phases[p + 1];
    for (size_t i = phase.first_message; i < next.first_message; ++i) {
      const MessageRecord& message = trace.messages[i];
      (sends ? *sends : reduces_gradients(message) ? rank.reductions : part->messages).push_back(message);
    }
    if (part)
      part->ops.assign(trace.ops.begin() + ptrdiff_t(phase.first_op), trace.ops.begin() + ptrdiff_t(next.first_op));
  }
  return rank;
}

/// What makes the ranks of two stages differ.
std::vector<int64_t> signature(const RunConfig& config, int pp) {
  std::vector<int64_t> signature;
  const MeshPlace place = place_of(config.mesh, rank_of(config.mesh, pp, 0));
  for (const Placement& placement : placements_of(config.model, config.parallel, config.mesh, place)) {
    int64_t experts = 0;
    for (int64_t i = 0; i < placement.layers; ++i) experts += config.model.moe_layer(placement.first_layer + i);
    signature.insert(signature.end(), {placement.layers, experts, placement.embedding, placement.head});
  }
  return signature;
}

}  // namespace

double flops_of(const Work& work) {
  double flops = 0;
  for (const OpRecord& op : work.ops) flops += op.flops;
  return flops;
}

std::vector<RankWork> step_work(const RunConfig& config) {
  const RunConfig traced = shortened(config);
  std::map<std::vector<int64_t>, RankWork> known;
  std::vector<RankWork> ranks;
  for (int pp = 0; pp < config.mesh.pp; ++pp) {
    const auto [entry, added] = known.try_emplace(signature(config, pp));
    if (added)
      entry->second = read_trace(trace_step(traced, rank_of(config.mesh, pp, 0)), int(traced.micro_batches()) - 1,
                                 int(config.parallel.virtual_stages));
    ranks.push_back(entry->second);
  }
  return ranks;
}

std::vector<Communication> communication_of(const RunConfig& config, const std::vector<RankWork>& ranks) {
  std::map<std::pair<std::string, std::string>, Communication> most;
  for (const RankWork& rank : ranks) {
    std::map<std::pair<std::string, std::string>, Communication> sent;
    const auto add = [&](const std::vector<MessageRecord>& messages, int64_t times = 1) {
      for (const MessageRecord& message : messages) {
        Communication& entry = sent[{message.group, message.operation}];
        entry.bytes += double(times) * message.bytes;
        entry.messages += times;
      }
    };
    for (const Work* work : {&rank.begin, &rank.reduce, &rank.norm, &rank.update}) add(work->messages);
    add(rank.reductions);
    add(rank.gathers);
    for (const ChunkWork& chunk : rank.chunks) {
      for (const Work* work : {&chunk.forward, &chunk.backward_input, &chunk.backward_weight})
        add(work->messages, config.micro_batches());
      add(chunk.send_forward, config.micro_batches());
      add(chunk.send_backward, config.micro_batches());
    }
    for (const auto& [key, entry] : sent)
      if (Communication& largest = most[key]; entry.bytes >= largest.bytes) largest = entry;
  }
  std::vector<Communication> all;
  for (auto& [key, entry] : most) all.push_back({key.first, key.second, entry.bytes, entry.messages});
  return all;
}

Schedule schedule_of(const RunConfig& config) {
  const ParallelConfig& parallel = config.parallel;
  return make_schedule(parallel.schedule, config.mesh.pp, int(parallel.virtual_stages), int(config.micro_batches()));
}

Timeline flop_timeline(const RunConfig& config, const std::vector<RankWork>& ranks) {
  const Schedule schedule = schedule_of(config);
  std::vector<StageCost> costs(size_t(schedule.stages()));
  for (int rank = 0; rank < schedule.pp; ++rank)
    for (int chunk = 0; chunk < schedule.virtual_stages; ++chunk) {
      const ChunkWork& work = ranks[size_t(rank)].chunks[size_t(chunk)];
      costs[size_t(schedule.stage(rank, chunk))] = {flops_of(work.forward), flops_of(work.backward_input),
                                                    flops_of(work.backward_weight)};
    }
  return simulate(schedule, costs);
}

}  // namespace optimus
