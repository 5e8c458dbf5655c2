#include "optimus/train/backend.h"

#include <map>

#include "optimus/comm/together.h"

namespace optimus {
namespace {

// Which rank has which device, looked at by the first.
void check_devices(const Device& device, Processes& processes) {
  const std::vector<std::string> identities = processes.gather(device.identity());
  together(processes, [&] {
    std::map<std::string, size_t> owners;
    for (size_t rank = 0; rank < identities.size(); ++rank) {
      require(identities[rank].empty() == identities[0].empty(), ErrorKind::kUsage,
              "rank 0 computes on {} and rank {} on {}: set run.device", identities[0].empty() ? "the CPU" : "a GPU",
              rank, identities[rank].empty() ? "the CPU" : "a GPU");
      if (identities[rank].empty()) continue;
      const auto [owner, free] = owners.emplace(identities[rank], rank);
      require(free, ErrorKind::kUsage,
              "ranks {} and {} have the same GPU: start one rank a GPU, or use run.device = \"cpu\"", owner->second,
              rank);
    }
  });
}

}  // namespace

std::unique_ptr<Device> open_device(DeviceKind kind, Processes& processes) {
  std::unique_ptr<Device> device;
  together(processes, [&] {
    device = kind == DeviceKind::cpu ? make_cpu_device()
                                     : make_cuda_device(cuda_devices() == 1 ? 0 : processes.local_rank());
  });
  if (processes.size() > 1) check_devices(*device, processes);
  return device;
}

std::unique_ptr<Ops> make_ops(const RunConfig& config, Device& device) {
  return device.kind() == DeviceKind::cpu ? make_cpu_ops() : make_cuda_ops(device, config.run.deterministic);
}

}  // namespace optimus
