// optimus import: a Hugging Face folder to a checkpoint.
#include "optimus/checkpoint/import.h"

#include <cstdio>

#include <CLI/CLI.hpp>

#include "optimus/cli/commands.h"

namespace optimus {

void add_import(CLI::App& program) {
  struct Options {
    std::string folder, out;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* command = program.add_subcommand("import", "Converts a Hugging Face folder to a checkpoint");
  command->add_option("HF_DIR", options->folder, "Folder with config.json and model*.safetensors")->required();
  command->add_option("--out", options->out, "The checkpoint's folder, made here")->required();
  command->callback([options] {
    const nlohmann::json report = import_hugging_face(options->folder, options->out);
    std::puts(report.dump().c_str());
  });
}

}  // namespace optimus
