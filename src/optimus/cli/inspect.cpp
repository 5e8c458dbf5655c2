// optimus inspect: what a checkpoint, a token file or a configuration holds, as JSON.
#include <cstdio>

#include <CLI/CLI.hpp>

#include "optimus/base/json.h"
#include "optimus/checkpoint/run_folder.h"
#include "optimus/cli/commands.h"
#include "optimus/data/token_file.h"
#include "optimus/train/config.h"

namespace optimus {
namespace {

nlohmann::ordered_json describe_checkpoint(const fs::path& path) {
  const Checkpoint checkpoint = resolve_checkpoint(path);
  int64_t parameters = 0;
  for (const auto& [name, record] : checkpoint.manifest().tensors)
    if (is_parameter(name)) parameters += record.global.elements();
  nlohmann::ordered_json description = {{"kind", "checkpoint"},
                                        {"path", checkpoint.folder().string()},
                                        {"step", checkpoint.step()},
                                        {"parameters", parameters},
                                        {"tensors", checkpoint.manifest().tensors.size()},
                                        {"config", checkpoint.manifest().config}};
  if (!checkpoint.manifest().source.is_null()) description["source"] = checkpoint.manifest().source;
  return description;
}

nlohmann::ordered_json describe_configuration(const std::string& path) {
  return {{"kind", "configuration"},
          {"path", path},
          {"config", section_to_json(load_config(path, {}, ConfigUse::shape, 0))}};
}

}  // namespace

void add_inspect(CLI::App& program) {
  const auto path = std::make_shared<std::string>();
  CLI::App* command = program.add_subcommand("inspect", "Shows what a checkpoint, token file or configuration holds");
  command->add_option("PATH", *path, "A checkpoint's folder, a run.dir, a token file, or a configuration (.toml)")
      ->required();
  command->callback([path] {
    const nlohmann::ordered_json description = fs::is_directory(*path)    ? describe_checkpoint(*path)
                                               : path->ends_with(".toml") ? describe_configuration(*path)
                                                                          : describe_token_file(*path);
    std::puts(description.dump().c_str());
  });
}

}  // namespace optimus
