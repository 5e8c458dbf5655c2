// optimus plan CONFIG.toml [--set ...] [--json]: what a run needs, found by running its step dry.
#include <CLI/CLI.hpp>

#include "optimus/cli/commands.h"
#include "optimus/train/engine.h"

namespace optimus {
namespace {

struct PlanOptions {
  std::string config;
  std::vector<std::string> overrides;
  bool json = false;
};

struct ParameterCounts {
  int64_t total, active, expert, replicated;
};

ParameterCounts count_parameters(const ModelConfig& model) {
  ParameterTable table;
  const Stage assembled(model, Placement::whole(model), 1, table);
  const int64_t expert = table.count(ParameterClass::expert), total = table.count();
  const int64_t active_expert = model.moe ? expert / model.moe->experts * model.moe->top_k : 0;
  return {total, total - expert + active_expert, expert, total - expert};
}

void plan(const PlanOptions& options) {
  const RunConfig config = load_config(options.config, options.overrides, ConfigUse::shape);
  const ParameterCounts parameters = count_parameters(config.model);
  const EnginePlan plan = plan_engine(config, EngineUse::train);
  const int64_t capacity = make_cpu_device()->capacity();
  const bool fits = plan.memory.total() <= capacity;

  if (options.json) {
    nlohmann::ordered_json segments(plan.segments);
    fmt::print(
        "{}\n",
        nlohmann::ordered_json{
            {"fits", fits},
            {"parameters",
             {{"total", parameters.total},
              {"active", parameters.active},
              {"expert", parameters.expert},
              {"replicated", parameters.replicated}}},
            {"memory", {{"total_bytes", plan.memory.total()}, {"device_bytes", capacity}, {"segments", segments}}},
            {"flops_per_token", flops_per_token(config.model)},
            {"step_flops", plan.step_flops}}
            .dump());
    return;
  }
  fmt::print("parameters        {:>18}\n  active a token  {:>18}\n  experts         {:>18}\n  replicated      {:>18}\n",
             parameters.total, parameters.active, parameters.expert, parameters.replicated);
  fmt::print("training FLOP     {:>18.4e} a token (causal attention counts half the square)\n",
             flops_per_token(config.model));
  fmt::print("global batch      {:>18} tokens in {} micro-batches\n\nmemory, one rank:\n", config.tokens_per_step(),
             config.micro_batches());
  for (const auto& [name, bytes] : plan.segments) fmt::print("  {:<24} {:>12.3f} MiB\n", name, double(bytes) / 0x1p20);
  fmt::print("  {:<24} {:>12.3f} MiB: {} this machine's {:.1f} GiB\n", "total", double(plan.memory.total()) / 0x1p20,
             fits ? "fits into" : "exceeds", double(capacity) / 0x1p30);
}

}  // namespace

void add_plan(CLI::App& program) {
  const auto options = std::make_shared<PlanOptions>();
  CLI::App* command = program.add_subcommand("plan", "Memory, parameters and FLOPs of a run, before it starts");
  command->add_option("CONFIG", options->config, "Configuration in TOML")->required();
  command->add_option("--set", options->overrides, "Override a key: section.key=value")->allow_extra_args(false);
  command->add_flag("--json", options->json, "One line of JSON");
  command->callback([options] { plan(*options); });
}

}  // namespace optimus
