#include "optimus/train/backend.h"

namespace optimus {

std::unique_ptr<Device> open_device(const RunConfig& config, const Processes& processes) {
  if (config.device_kind() == DeviceKind::cpu) return make_cpu_device();
  return make_cuda_device(cuda_devices() == 1 ? 0 : processes.local_rank());
}

std::unique_ptr<Ops> make_ops(const RunConfig& config, Device& device) {
  return device.kind() == DeviceKind::cpu ? make_cpu_ops() : make_cuda_ops(device, config.run.deterministic);
}

}  // namespace optimus
