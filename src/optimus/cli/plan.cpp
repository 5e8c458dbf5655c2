// optimus plan CONFIG.toml [--ranks N] [--hardware NAME] [--search] [--set ...] [--json]: what a run needs, how its
// ranks share the work and how long a step would take, found by running its step dry.
#include <CLI/CLI.hpp>

#include "optimus/cli/commands.h"
#include "optimus/plan/report.h"

namespace optimus {
namespace {

struct PlanOptions {
  std::string config;
  std::vector<std::string> overrides;
  int64_t ranks = 0;
  std::string hardware;
  bool search = false;
  bool json = false;
};

/// Described hardware is GPUs; this machine need not have any.
RunConfig resolved_config(PlanOptions options) {
  if (!options.hardware.empty()) options.overrides.emplace_back("run.device=cuda");
  return load_config(options.config, options.overrides, ConfigUse::shape, options.ranks);
}

RunConfig plan_config(PlanOptions options) {
  if (!options.search) return resolved_config(options);
  const int64_t world = std::exchange(options.ranks, 0);  // the file's own layout need not suit so many ranks
  RunConfig config = resolved_config(options);
  config.mesh = make_mesh_shape(world, 1, 1);
  return config;
}

void print(const std::string& text, const nlohmann::ordered_json& json, bool as_json) {
  fmt::print("{}", as_json ? json.dump() + "\n" : text);
}

void plan(const PlanOptions& options) {
  std::optional<Hardware> hardware;
  if (!options.hardware.empty()) hardware = load_hardware(options.hardware);
  require(!options.search || (hardware && options.ranks > 0), ErrorKind::kUsage,
          "--search needs --ranks and --hardware: how many devices there are, and what they can do");
  const RunConfig config = plan_config(options);
  if (!options.search) {
    const bool layout = options.ranks > 0 || config.mesh.world() > 1;
    const PlanReport report = make_report(config, hardware);
    print(to_text(report, layout), to_json(report, layout), options.json);
    return;
  }
  const SearchResult result = search_layouts(config, *hardware);
  print(to_text(result, *hardware), to_json(result), options.json);
}

}  // namespace

void add_plan(CLI::App& program) {
  const auto options = std::make_shared<PlanOptions>();
  CLI::App* command = program.add_subcommand("plan", "Memory, communication and time of a run, before it starts");
  command->add_option("CONFIG", options->config, "Configuration in TOML")->required();
  command->add_option("--ranks", options->ranks, "Ranks of the run (default: the fewest that its layout needs)")
      ->check(CLI::PositiveNumber);
  command->add_option("--hardware", options->hardware, "Predict times: aurora, h200 or a description in TOML");
  command->add_flag("--search", options->search, "Rank the layouts that fit by predicted step time");
  command->add_option("--set", options->overrides, "Override a key: section.key=value")->allow_extra_args(false);
  command->add_flag("--json", options->json, "One line of JSON");
  command->callback([options] { plan(*options); });
}

}  // namespace optimus
