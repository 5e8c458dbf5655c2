// The processes of a distributed test program. All of them run the same tests in the same order.
#pragma once

#include "optimus/comm/processes.h"

namespace optimus::test {

/// Those that main() started.
Processes& processes();

}  // namespace optimus::test
