// The program's log goes to standard error; standard output is for results. Library code logs through log(), which
// main() and tests may redirect or silence by spdlog's own means.
#pragma once

#include <spdlog/spdlog.h>

namespace optimus {

/// The logger named "optimus" (standard error, level info by default).
spdlog::logger& log();

}  // namespace optimus
