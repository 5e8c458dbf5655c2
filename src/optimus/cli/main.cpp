// The program: one command a file, errors to one paragraph on standard error and to their exit code.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include <CLI/CLI.hpp>

#include "optimus/base/error.h"
#include "optimus/base/version.h"
#include "optimus/cli/commands.h"
#include "optimus/cli/ranks.h"

namespace {

// Threads that wait for each other spin, which is fastest while every thread has a core of its own and ruinous when
// another process wants one: then each hand-over costs a time slice. A short spin keeps the one and avoids the other.
// libgomp reads its settings before main(), hence the second start.
void bound_spinning(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
  setenv("GOMP_SPINCOUNT", "20000", 1);
  std::error_code unknown;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", unknown).string();
  execv(program.c_str(), argv);  // returns only where that is not possible; then all goes on as it is
}

}  // namespace

int main(int argc, char** argv) {
  bound_spinning(argv);
  CLI::App program("Optimus: pretrains dense and Mixture-of-Experts language models", "optimus");
  program.set_version_flag("--version", std::string("optimus ") + optimus::kVersion);
  program.require_subcommand(1);
  optimus::add_train(program);
  optimus::add_tokenize(program);
  optimus::add_generate(program);
  optimus::add_eval(program);
  optimus::add_import(program);
  optimus::add_export(program);
  optimus::add_inspect(program);
  optimus::add_verify(program);
  optimus::add_plan(program);
  optimus::add_bench(program);
  try {
    program.parse(argc, argv);
    return 0;
  } catch (const CLI::RuntimeError& stop) {
    return stop.get_exit_code();
  } catch (const CLI::ParseError& error) {
    const int code = program.exit(error, std::cout, std::cerr);
    return code == 0 ? 0 : int(optimus::ErrorKind::kUsage);
  } catch (...) {
    return optimus::report_error("optimus");
  }
}
