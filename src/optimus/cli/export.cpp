// optimus export: a checkpoint to a Hugging Face folder.
#include "optimus/checkpoint/export.h"

#include <cstdio>

#include <CLI/CLI.hpp>

#include "optimus/checkpoint/run_folder.h"
#include "optimus/cli/commands.h"

namespace optimus {

void add_export(CLI::App& program) {
  struct Options {
    std::string checkpoint, out;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand("export", "Converts a checkpoint to a Hugging Face folder");
  command->add_option("CHECKPOINT", options->checkpoint, "A checkpoint's folder or a run.dir")->required();
  command->add_option("--out", options->out, "The Hugging Face folder, made here")->required();
  command->callback([options] {
    Checkpoint checkpoint = resolve_checkpoint(options->checkpoint);
    const nlohmann::json report = export_hugging_face(checkpoint, options->out);
    std::puts(report.dump().c_str());
  });
}

}  // namespace optimus
