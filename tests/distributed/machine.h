// What distributed tests compute on, and communicators over its memory: the CPU and MPI, or with OPTIMUS_TEST_DEVICE=cuda
// one GPU a process and NCCL.
#pragma once

#include "distributed/processes.h"
#include "optimus/train/backend.h"
#include "support/tiny_model.h"

namespace optimus::test {

inline bool on_gpus() { return test_device() == "cuda"; }

/// This process's device.
inline std::unique_ptr<Device> make_device() {
  return open_device(on_gpus() ? DeviceKind::cuda : DeviceKind::cpu, processes());
}

/// Over the memory of such devices; neighbours may send each other messages. A process's first one is the world's.
inline std::unique_ptr<Communicator> make_communicator(Device& device, const std::string& name,
                                                       const std::vector<int>& ranks) {
  if (on_gpus()) return make_nccl_communicator(processes(), device, name, ranks, Messages::between_neighbours);
  return processes().make_communicator(name, ranks);
}

/// Memory of a device.
class DeviceTensor {
 public:
  DeviceTensor(Device& device, DType dtype, Shape shape)
      : device_(device), bytes_(shape.elements() * size_of(dtype)), tensor_(device.allocate(bytes_), dtype, shape) {}
  ~DeviceTensor() { device_.release(tensor_.data, bytes_); }
  DeviceTensor(const DeviceTensor&) = delete;
  DeviceTensor& operator=(const DeviceTensor&) = delete;

  const Tensor& operator*() const { return tensor_; }
  std::vector<std::byte> read_wait() const {
    std::vector<std::byte> out(static_cast<size_t>(bytes_));
    device_.to_host_wait(out.data(), tensor_);
    return out;
  }

 private:
  Device& device_;
  int64_t bytes_;
  Tensor tensor_;
};

}  // namespace optimus::test
