#include "optimus/plan/prediction.h"

#include <algorithm>
#include <numeric>

#include "optimus/plan/links.h"

namespace optimus {
namespace {

/// Seconds by what is done.
using Times = std::map<std::string, double>;

double total(const Times& times) {
  return std::accumulate(times.begin(), times.end(), 0.0,
                         [](double sum, const auto& part) { return sum + part.second; });
}

void add(Times& to, const Times& times, double factor = 1) {
  for (const auto& [name, seconds] : times) to[name] += factor * seconds;
}

/// Times of the work of one rank.
class Pricing {
 public:
  Pricing(const RunConfig& config, const Hardware& hardware, int pp)
      : hardware_(hardware), links_(hardware, config.mesh, rank_of(config.mesh, pp, 0)) {
    if (!config.model.moe) return;
    const double rows = double(config.train.micro_batch * config.model.sequence * config.model.moe->top_k);
    const double rows_per_expert = rows * config.mesh.ep / double(config.model.moe->experts);
    grouped_share_ = rows_per_expert / (rows_per_expert + hardware.grouped_rows.value);
  }

  Times of(const Work& work) const {
    Times times;
    for (const OpRecord& op : work.ops) times[std::string(op.op)] += seconds(op);
    if (!work.ops.empty()) times["kernel launches"] += double(work.ops.size()) * hardware_.launch.value;
    for (const MessageRecord& message : work.messages)
      times[message.operation + " over " + message.group] += seconds(message);
    return times;
  }
  double kernels(const Work& work) const { return total(of(Work{work.ops, {}})); }
  /// One after the other.
  std::vector<double> of(const std::vector<MessageRecord>& messages) const {
    std::vector<double> times;
    for (const MessageRecord& message : messages) times.push_back(seconds(message));
    return times;
  }

 private:
  double seconds(const OpRecord& op) const {
    return std::max(op.flops / rate(op.op), op.bytes / hardware_.memory.value);
  }
  double seconds(const MessageRecord& message) const {
    // Layers are alike, so few messages differ.
    const auto [known, added] = known_.try_emplace({message.group, message.operation, message.bytes});
    if (added) known->second = links_.seconds(message);
    return known->second;
  }
  double rate(std::string_view op) const {
    if (op.starts_with("grouped_matmul")) return hardware_.grouped_matmul.value * grouped_share_;
    if (op == "attention") return hardware_.attention.value;
    if (op == "attention_backward") return hardware_.attention_backward.value;
    return hardware_.matmul.value;
  }

  const Hardware& hardware_;
  Links links_;
  double grouped_share_ = 1;
  mutable std::map<std::tuple<std::string, std::string, double>, double> known_;
};

double sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

/// What is left of transfers after `window` seconds of compute that makes them ready at equal distances.
double exposed_after(const std::vector<double>& transfers, double window) {
  double end = 0;
  for (size_t i = 0; i < transfers.size(); ++i)
    end = std::max(end, window * double(i + 1) / double(transfers.size())) + transfers[i];
  return std::max(0.0, end - window);
}

/// How much transfers that start at once delay `window` seconds of compute that needs them at equal distances.
double exposed_before(const std::vector<double>& transfers, double window) {
  double end = 0, delay = 0;
  for (size_t i = 0; i < transfers.size(); ++i) {
    end += transfers[i];
    delay = std::max(delay, end - window * double(i) / double(transfers.size()));
  }
  return delay;
}

struct ChunkTimes {
  Times forward, backward_input, backward_weight;
  double send_forward, send_backward;
};

struct Transfers {
  double all = 0, exposed = 0;
};

/// One rank's step.
struct RankTimes {
  std::vector<ChunkTimes> chunks;
  Transfers reductions, gathers;
  Times begin, reduce, squares, agree, update;

  double reduced() const { return reductions.exposed + total(reduce) + total(squares); }
  double updated() const { return total(update) + gathers.exposed; }
  double optimizer() const {
    return reductions.all + total(reduce) + total(squares) + total(agree) + total(update) + gathers.all;
  }
};

RankTimes times_of(const RankWork& work, const Pricing& pricing) {
  RankTimes times;
  double forward = 0, backward = 0;  // of kernels, one micro-batch
  for (const ChunkWork& chunk : work.chunks) {
    times.chunks.push_back({pricing.of(chunk.forward), pricing.of(chunk.backward_input),
                            pricing.of(chunk.backward_weight), sum(pricing.of(chunk.send_forward)),
                            sum(pricing.of(chunk.send_backward))});
    forward += pricing.kernels(chunk.forward);
    backward += pricing.kernels(chunk.backward_input) + pricing.kernels(chunk.backward_weight);
  }
  const std::vector<double> reductions = pricing.of(work.reductions), gathers = pricing.of(work.gathers);
  times.reductions = {sum(reductions), exposed_after(reductions, backward)};
  times.gathers = {sum(gathers), exposed_before(gathers, forward)};
  times.begin = pricing.of(work.begin);
  times.reduce = pricing.of(work.reduce);
  times.squares = pricing.of(Work{work.norm.ops, {}});
  times.agree = pricing.of(Work{{}, work.norm.messages});
  times.update = pricing.of(work.update);
  return times;
}

std::vector<RankTimes> all_times(const RunConfig& config, const std::vector<RankWork>& ranks,
                                 const Hardware& hardware) {
  require(config.precision.compute == "bf16", ErrorKind::kUsage,
          "{}: its rates are those of bf16, so precision.compute = \"{}\" cannot be predicted", hardware.name,
          config.precision.compute);
  std::vector<RankTimes> times;
  for (int pp = 0; pp < config.mesh.pp; ++pp)
    times.push_back(times_of(ranks[size_t(pp)], Pricing(config, hardware, pp)));
  return times;
}

std::vector<StageCost> costs_of(const Schedule& schedule, const std::vector<RankTimes>& ranks) {
  std::vector<StageCost> costs(size_t(schedule.stages()));
  for (int rank = 0; rank < schedule.pp; ++rank)
    for (int chunk = 0; chunk < schedule.virtual_stages; ++chunk) {
      const ChunkTimes& times = ranks[size_t(rank)].chunks[size_t(chunk)];
      costs[size_t(schedule.stage(rank, chunk))] = {total(times.forward), total(times.backward_input),
                                                    total(times.backward_weight), times.send_forward,
                                                    times.send_backward};
    }
  return costs;
}

}  // namespace

double Prediction::hidden_seconds() const {
  double hidden = 0;
  for (const Part& part : parts) hidden += part.hidden;
  return hidden;
}

std::vector<StageCost> stage_costs(const RunConfig& config, const std::vector<RankWork>& ranks,
                                   const Hardware& hardware) {
  return costs_of(schedule_of(config), all_times(config, ranks, hardware));
}

Prediction predict(const RunConfig& config, const std::vector<RankWork>& work, const Hardware& hardware) {
  const std::vector<RankTimes> ranks = all_times(config, work, hardware);
  const Schedule schedule = schedule_of(config);
  const Timeline pipeline = simulate(schedule, costs_of(schedule, ranks));
  const auto slowest = [&](double (RankTimes::*seconds)() const) -> const RankTimes& {
    return *std::ranges::max_element(ranks, {}, [&](const RankTimes& rank) { return (rank.*seconds)(); });
  };
  const RankTimes& reducing = slowest(&RankTimes::reduced);
  const RankTimes& updating = slowest(&RankTimes::updated);
  const size_t busiest = size_t(std::ranges::max_element(pipeline.busy) - pipeline.busy.begin());

  Times times = ranks.front().begin;
  for (const ChunkTimes& chunk : ranks[busiest].chunks)
    for (const Times* part : {&chunk.forward, &chunk.backward_input, &chunk.backward_weight})
      add(times, *part, double(config.micro_batches()));
  if (schedule.pp > 1) times["waiting for other stages"] = pipeline.seconds - pipeline.busy[busiest];
  for (const Times* part : {&reducing.reduce, &reducing.squares, &reducing.agree, &updating.update}) add(times, *part);

  Prediction prediction;
  for (const auto& [name, seconds] : times) prediction.parts.push_back({name, seconds});
  const auto add_transfers = [&](const char* name, const Transfers& transfers) {
    if (transfers.all > 0) prediction.parts.push_back({name, transfers.exposed, transfers.all - transfers.exposed});
  };
  add_transfers("reduction of gradients", reducing.reductions);
  add_transfers("gathering of weights", updating.gathers);
  std::ranges::stable_sort(prediction.parts, std::greater{}, &Part::seconds);

  for (const Part& part : prediction.parts) prediction.step_seconds += part.seconds;
  prediction.bubble = pipeline.bubble;
  prediction.optimizer_seconds = slowest(&RankTimes::optimizer).optimizer();
  prediction.tokens_per_second = double(config.tokens_per_step()) / prediction.step_seconds;
  prediction.device_flops = flops_per_token(config.model) * prediction.tokens_per_second / config.mesh.world();
  prediction.mfu = prediction.device_flops / hardware.peak.value;
  return prediction;
}

}  // namespace optimus
