// Errors of one rank, shared by all.
#pragma once

#include <functional>

#include "optimus/comm/processes.h"

namespace optimus {

/// Runs `work` on every rank; where it throws an Error on some, every rank throws that of the lowest of them. Errors of the
/// file system and of memory become Errors. Collective.
void together(Processes& processes, const std::function<void()>& work);

}  // namespace optimus
