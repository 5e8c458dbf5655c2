#include "optimus/ops/cpu/cpu_ops.h"

namespace optimus {

std::unique_ptr<Ops> make_cpu_ops() { return std::make_unique<cpu::CpuOps>(); }

}  // namespace optimus
