// optimus train CONFIG.toml [--set key=value ...]
#include <csignal>

#include <CLI/CLI.hpp>

#include "optimus/cli/commands.h"
#include "optimus/cli/ranks.h"
#include "optimus/train/trainer.h"

namespace optimus {
namespace {

std::atomic<int> stop_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

int train(const std::string& path, const std::vector<std::string>& overrides, Processes& processes) {
  const RunConfig config = load_config(path, overrides, ConfigUse::train, processes.size());
  processes.barrier();            // nobody changes the run's folder before all have read their configuration
  std::signal(SIGPIPE, SIG_IGN);  // a reader of the log that goes away does not end the run
  // Batch systems announce the end of a job's time by SIGUSR1, and mpirun forwards it to all ranks at once, unlike SIGTERM.
  for (int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    struct sigaction action {};
    action.sa_handler = [](int number) { stop_signal = number == SIGUSR1 ? SIGTERM : number; };
    action.sa_flags = SA_RESTART;  // the save that the signal asks for must not fail because of it
    sigaction(signal, &action, nullptr);
  }
  return Trainer(config, stop_signal, processes).run();
}

}  // namespace

void add_train(CLI::App& program) {
  CLI::App* command = program.add_subcommand("train", "Train a model, or resume what run.dir holds");
  const auto path = std::make_shared<std::string>();
  const auto overrides = std::make_shared<std::vector<std::string>>();
  command->add_option("CONFIG", *path, "Configuration in TOML")->required();
  command->add_option("--set", *overrides, "Override a key: section.key=value")->allow_extra_args(false);
  command->callback([=] {
    const int code = run_on_ranks([&](Processes& processes) { return train(*path, *overrides, processes); });
    if (code != 0) throw CLI::RuntimeError(code);
  });
}

}  // namespace optimus
