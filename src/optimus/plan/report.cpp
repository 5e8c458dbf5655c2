#include "optimus/plan/report.h"

#include <iterator>

#include <fmt/ranges.h>

#include "optimus/parallel/placements.h"

namespace optimus {
namespace {

using nlohmann::ordered_json;

constexpr double kMiB = 0x1p20, kGiB = 0x1p30;

/// Collects lines.
class Text {
 public:
  template <typename... Args>
  Text& line(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Args>(args)...);
    text_ += '\n';
    return *this;
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
};

/// "0 12 24 ... 3060" for ranks at equal distances.
std::string example_of(const std::vector<int>& ranks) {
  if (ranks.size() <= 4) return fmt::format("{}", fmt::join(ranks, " "));
  return fmt::format("{} {} {} ... {}", ranks[0], ranks[1], ranks[2], ranks.back());
}

std::string seconds_text(double seconds) {
  return seconds < 1 ? fmt::format("{:.2f} ms", 1e3 * seconds) : fmt::format("{:.3f} s", seconds);
}

std::string schedule_name(const RunConfig& config) {
  const ParallelConfig& parallel = config.parallel;
  if (config.mesh.pp == 1) return "-";
  return parallel.virtual_stages > 1 ? fmt::format("{} V={}", parallel.schedule, parallel.virtual_stages)
                                     : parallel.schedule;
}

void add_groups(const RunConfig& config, Text& text) {
  const MeshShape& shape = config.mesh;
  text.line("\n{} ranks: pp {} x dp {}; experts: pp {} x edp {} x ep {}", shape.world(), shape.pp, shape.dp, shape.pp,
            shape.edp, shape.ep);
  text.line("  {:<6} {:>8} {:>8}  rank 0's", "group", "ranks", "groups");
  const auto group = [&](const char* name, const std::vector<int>& ranks) {
    text.line("  {:<6} {:>8} {:>8}  {}", name, ranks.size(), shape.world() / int(ranks.size()), example_of(ranks));
  };
  group("dp", dp_group(shape, 0));
  group("ep", ep_group(shape, 0));
  group("edp", edp_group(shape, 0));
  group("pp", pp_group(shape, 0));
}

void add_owners(const RunConfig& config, Text& text) {
  text.line("\n  {:<5} {:<24} {:<14} {:>15} {:>15} {:>8}", "pp", "layers", "experts", "expert", "replicated", "GiB");
  for (int pp = 0; pp < config.mesh.pp; ++pp) {
    ParameterTable table;
    std::vector<Stage> stages;
    std::vector<std::string> layers;
    int64_t experts = 0;
    for (const Placement& placement : placements_of(config.model, config.parallel, config.mesh,
                                                    place_of(config.mesh, rank_of(config.mesh, pp, 0)))) {
      stages.emplace_back(config.model, placement, config.memory.moe_rows, table);
      if (placement.embedding) layers.emplace_back("embedding");
      layers.push_back(fmt::format("{}-{}", placement.first_layer, placement.first_layer + placement.layers - 1));
      if (placement.head) layers.emplace_back("head");
      experts = placement.experts;
    }
    const EnginePlan plan = plan_engine(config, EngineUse::train, rank_of(config.mesh, pp, 0));
    int64_t elements[2] = {};
    for (const Parameter& row : table.rows()) elements[row.cls == ParameterClass::expert] += row.local.elements();
    text.line("  {:<5} {:<24} {:<14} {:>15} {:>15} {:>8.2f}", pp, fmt::format("{}", fmt::join(layers, ", ")),
              experts ? fmt::format("{} of {}", experts, config.model.moe->experts) : "-", elements[1], elements[0],
              double(plan.memory.total()) / kGiB);
  }
  text.line("  (experts, parameters and memory of one rank)");
}

void add_communication(const PlanReport& report, Text& text) {
  text.line("\nsent in a step, by the rank that sends most of a kind:");
  text.line("  {:<10} {:<15} {:>13} {:>10}", "group", "operation", "MiB", "messages");
  for (const Communication& entry : report.communication)
    text.line("  {:<10} {:<15} {:>13.3f} {:>10}", entry.group, entry.operation, entry.bytes / kMiB, entry.messages);
}

void add_prediction(const PlanReport& report, Text& text) {
  const Prediction& prediction = *report.prediction;
  text.line("\nprediction for {}: {} a step", report.device, seconds_text(prediction.step_seconds));
  text.line("  {:.0f} tokens/s, {:.1f} TFLOP/s a device, MFU {:.1f} %, bubble {:.1f} %", prediction.tokens_per_second,
            prediction.device_flops / 1e12, 100 * prediction.mfu, 100 * prediction.bubble);
  text.line("  optimizer step with nothing hidden: {}", seconds_text(prediction.optimizer_seconds));
  text.line("\n  {:<28} {:>12} {:>8} {:>14}", "slowest parts", "time", "share", "hidden besides");
  constexpr size_t kShown = 12;
  Part rest{fmt::format("{} more", prediction.parts.size() - std::min(kShown, prediction.parts.size()))};
  const auto row = [&](const Part& part) {
    text.line("  {:<28} {:>12} {:>6.1f} % {:>14}", part.name, seconds_text(part.seconds),
              100 * part.seconds / prediction.step_seconds, part.hidden > 0 ? seconds_text(part.hidden) : "");
  };
  for (size_t i = 0; i < prediction.parts.size(); ++i) {
    const Part& part = prediction.parts[i];
    if (i < kShown || part.hidden > 0) row(part);
    else rest.seconds += part.seconds;
  }
  if (rest.seconds > 0) row(rest);
}

ordered_json prediction_json(const Prediction& prediction) {
  ordered_json json{
      {"step_seconds", prediction.step_seconds},           {"tokens_per_second", prediction.tokens_per_second},
      {"tflops", prediction.device_flops / 1e12},          {"mfu", prediction.mfu},
      {"optimizer_seconds", prediction.optimizer_seconds}, {"slowest", ordered_json::array()}};
  for (const Part& part : prediction.parts)
    json["slowest"].push_back({{"name", part.name},
                               {"seconds", part.seconds},
                               {"share", part.seconds / prediction.step_seconds},
                               {"hidden_seconds", part.hidden}});
  return json;
}

ordered_json mesh_json(const MeshShape& shape) {
  return {{"pp", shape.pp}, {"ep", shape.ep}, {"dp", shape.dp}, {"edp", shape.edp}};
}

}  // namespace

ParameterCounts count_parameters(const ModelConfig& model) {
  const ParameterTable table = whole_table(model);
  const int64_t expert = table.count(ParameterClass::expert), total = table.count();
  const int64_t active_expert = model.moe ? expert / model.moe->experts * model.moe->top_k : 0;
  return {total, total - expert + active_expert, expert, total - expert};
}

/// Of the device that the run would have on this machine; 0 where it is a GPU and there is none.
static int64_t capacity_here(const RunConfig& config) {
  if (config.device_kind() == DeviceKind::cpu) return make_cpu_device()->capacity();
  return cuda_devices() > 0 ? make_cuda_device(0)->capacity() : 0;
}

PlanReport make_report(const RunConfig& config, const std::optional<Hardware>& hardware) {
  PlanReport report;
  report.config = config;
  report.parameters = count_parameters(config.model);
  report.memory = largest_memory(config, hardware);
  report.device = hardware ? hardware->name : "this machine";
  report.device_bytes = hardware ? int64_t(hardware->device_bytes.value) : capacity_here(config);
  const std::vector<RankWork> ranks = step_work(config);
  report.communication = communication_of(config, ranks);
  if (hardware) report.prediction = predict(config, ranks, *hardware);
  report.bubble = report.prediction ? report.prediction->bubble : flop_timeline(config, ranks).bubble;
  return report;
}

std::string to_text(const PlanReport& report, bool layout) {
  const RunConfig& config = report.config;
  const EnginePlan& plan = report.memory.plan;
  Text text;
  text.line("parameters        {:>18}", report.parameters.total)
      .line("  active a token  {:>18}", report.parameters.active)
      .line("  experts         {:>18}", report.parameters.expert)
      .line("  replicated      {:>18}", report.parameters.replicated)
      .line("training FLOP     {:>18.4e} a token (causal attention counts half the square)",
            flops_per_token(config.model))
      .line("global batch      {:>18} tokens in {} micro-batches{}", config.tokens_per_step(), config.micro_batches(),
            config.mesh.dp > 1 ? fmt::format(" on each of dp = {} ranks", config.mesh.dp) : "");
  if (layout) {
    add_groups(config, text);
    add_owners(config, text);
    text.line("\n  dispatcher {}, schedule {}, sharding {}, {} bytes of a gradient", dispatcher_of(config),
              schedule_name(config), config.optimizer.sharding, size_of(config.gradient_dtype()));
  }
  text.line("\nmemory, one rank{}:",
            config.mesh.pp > 1 ? fmt::format(" with pp {}, the largest", report.memory.pp) : "");
  for (const auto& [name, bytes] : plan.segments) text.line("  {:<24} {:>12.3f} MiB", name, double(bytes) / kMiB);
  const std::string verdict = report.device_bytes == 0
                                  ? "this machine shows no GPU to compare it with"
                                  : fmt::format("{} the {:.1f} GiB of {}", report.fits() ? "fits into" : "exceeds",
                                                double(report.device_bytes) / kGiB, report.device);
  text.line("  {:<24} {:>12.3f} MiB: {}", "total", double(plan.memory.total()) / kMiB, verdict);
  if (layout && config.mesh.world() > 1) {
    add_communication(report, text);
    if (!report.prediction) text.line("\nbubble {:.1f} % with times in proportion to FLOPs", 100 * report.bubble);
  }
  if (report.prediction) add_prediction(report, text);
  return text.take();
}

ordered_json to_json(const PlanReport& report, bool layout) {
  const EnginePlan& plan = report.memory.plan;
  ordered_json json{{"fits", report.fits()},
                    {"parameters",
                     {{"total", report.parameters.total},
                      {"active", report.parameters.active},
                      {"expert", report.parameters.expert},
                      {"replicated", report.parameters.replicated}}},
                    {"memory",
                     {{"total_bytes", plan.memory.total()},
                      {"device_bytes", report.device_bytes},
                      {"segments", ordered_json(plan.segments)}}},
                    {"flops_per_token", flops_per_token(report.config.model)},
                    {"step_flops", plan.step_flops}};
  if (layout) {
    json["mesh"] = mesh_json(report.config.mesh);
    json["communication"] = ordered_json::array();
    for (const Communication& entry : report.communication)
      json["communication"].push_back({{"group", entry.group},
                                       {"operation", entry.operation},
                                       {"bytes", entry.bytes},
                                       {"messages", entry.messages}});
    json["bubble"] = report.bubble;
  }
  if (report.prediction) json.update(prediction_json(*report.prediction));
  return json;
}

std::string to_text(const SearchResult& result, const Hardware& hardware) {
  Text text;
  text.line("{} layouts, of which these fit {} and are the fastest:\n", result.layouts, hardware.name);
  text.line("{:>3} {:>4} {:>4} {:>6} {:>6} {:>5}  {:<15} {:<10} {:>10} {:>7} {:>8} {:>9}  {}", "pp", "ep", "edp", "dp",
            "batch", "micro", "schedule", "dispatch", "step", "MFU", "bubble", "GiB", "slowest parts");
  for (const auto& [config, bytes, prediction] : result.best) {
    std::vector<std::string> slowest;
    for (size_t i = 0; i < std::min<size_t>(3, prediction.parts.size()); ++i)
      slowest.push_back(fmt::format("{} {:.0f} %", prediction.parts[i].name,
                                    100 * prediction.parts[i].seconds / prediction.step_seconds));
    text.line("{:>3} {:>4} {:>4} {:>6} {:>6} {:>5}  {:<15} {:<10} {:>10} {:>5.1f} % {:>6.1f} % {:>9.1f}  {}",
              config.mesh.pp, config.mesh.ep, config.mesh.edp, config.mesh.dp, config.train.micro_batch,
              config.micro_batches(), schedule_name(config), dispatcher_of(config),
              seconds_text(prediction.step_seconds), 100 * prediction.mfu, 100 * prediction.bubble,
              double(bytes) / kGiB, fmt::join(slowest, ", "));
  }
  if (result.best.empty()) {
    text.line("none fits");
    return text.take();
  }
  const ModelConfig& model = result.best.front().config.model;
  if (model.moe_layers() > 0 && model.moe->balance == "loss" && model.moe->balance_unit == "micro_batch")
    text.line("\nmodel.moe.balance_unit = \"micro_batch\": train.micro_batch (\"batch\") is part of what is computed");
  return text.take();
}

ordered_json to_json(const SearchResult& result) {
  ordered_json layouts = ordered_json::array();
  for (const auto& [config, bytes, prediction] : result.best) {
    ordered_json layout{{"mesh", mesh_json(config.mesh)},
                        {"micro_batch", config.train.micro_batch},
                        {"schedule", config.parallel.schedule},
                        {"virtual_stages", config.parallel.virtual_stages},
                        {"dispatcher", dispatcher_of(config)},
                        {"sharding", config.optimizer.sharding},
                        {"memory_bytes", bytes},
                        {"bubble", prediction.bubble}};
    layout.update(prediction_json(prediction));
    layouts.push_back(std::move(layout));
  }
  return {{"layouts", layouts}};
}

}  // namespace optimus
