// optimus verify: reads every byte of a checkpoint, or of all checkpoints of a run.dir, and names every damaged tensor.
#include <cstdio>

#include <CLI/CLI.hpp>

#include "optimus/checkpoint/run_folder.h"
#include "optimus/cli/commands.h"

namespace optimus {

void add_verify(CLI::App& program) {
  const auto path = std::make_shared<std::string>();
  CLI::App* command = program.add_subcommand("verify", "Checks every checksum of a checkpoint");
  command->add_option("CHECKPOINT", *path, "A checkpoint's folder, or a run.dir for all of its checkpoints")
      ->required();
  command->callback([path] {
    const VerifyReport report = verify_checkpoint(*path);
    nlohmann::json damaged = nlohmann::json::array();
    for (const Damage& damage : report.damages)
      damaged.push_back({{"file", damage.file}, {"tensor", damage.tensor}, {"error", damage.message}});
    const nlohmann::json result = {{"checkpoints", report.checkpoints},
                                   {"tensors", report.tensors},
                                   {"valid", report.damages.empty()},
                                   {"damaged", std::move(damaged)}};
    std::puts(result.dump().c_str());
    require(report.damages.empty(), ErrorKind::kData, "{} is damaged: {}", *path, damage_text(report.damages));
  });
}

}  // namespace optimus
