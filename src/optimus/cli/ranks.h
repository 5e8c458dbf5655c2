// Commands that may run as several processes.
#pragma once

#include <functional>
#include <string>

#include "optimus/comm/processes.h"

namespace optimus {

/// Prints the exception being handled as the program's one paragraph on standard error and returns its exit code.
int report_error(const std::string& who);

/// Runs `work` on every rank, the machine's cores shared among its ranks, and returns its exit code. On one of several
/// ranks an exception ends them all: the first rank speaks where all have the same to say.
int run_on_ranks(const std::function<int(Processes&)>& work);

}  // namespace optimus
