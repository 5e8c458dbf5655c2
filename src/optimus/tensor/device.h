// Device: who provides memory and copies. The CPU's memory is the host's; the dry device hands out addresses that
// nothing may touch, so that the very same step can be planned for a machine that is not here.
#pragma once

#include <cstdint>
#include <memory>

#include "optimus/tensor/tensor.h"

namespace optimus {

enum class DeviceKind : uint8_t { cpu, cuda };

/// A moment of a device's work: when all that it had been asked for before was done.
class Moment {
 public:
  virtual ~Moment() = default;
  /// Seconds from an earlier moment of the same device to this one; waits for both.
  virtual double seconds_since_wait(const Moment& earlier) const = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceKind kind() const = 0;
  /// True where memory has no contents and nothing is computed.
  virtual bool dry() const { return false; }
  /// Bytes this process may plan with; 0 = unknown.
  virtual int64_t capacity() const = 0;
  /// FLOP/s of dense bf16 products by the data sheet; 0 = unknown.
  virtual double peak_flops() const { return 0; }
  /// Bytes in use on the device, by whatever; 0 = unknown.
  virtual int64_t used_bytes() const { return 0; }

  /// Uninitialised, 256-byte aligned. Throws Error(kMemory) when refused.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* data, int64_t bytes) = 0;

  /// What no other device of any machine has; "" for a CPU.
  virtual std::string identity() const { return {}; }

  /// Copies between host memory and the (contiguous) tensor, in order with the device's kernels; `from` may be reused at
  /// once. `to_host_wait` makes the host wait for the device. A device that fails is Error(kCommunication), here and in
  /// everything that waits for it.
  virtual void from_host(Tensor to, const void* from) = 0;
  virtual void to_host_wait(void* to, Tensor from) = 0;
  /// What the host asks for from here on shows under this name in a profiler's timeline, until the next name; "" ends it.
  virtual void timeline(std::string_view) {}
  /// Waits until the device has done all that it was asked for.
  virtual void synchronise_wait() {}
  virtual std::unique_ptr<Moment> moment();
};

std::unique_ptr<Device> make_cpu_device();
/// GPU `index` of this machine. Throws Error(kUsage) with one sentence where it cannot be used (none there, a driver too
/// old, an architecture that this program was not built for, a build without CUDA).
std::unique_ptr<Device> make_cuda_device(int index);
/// GPUs of this machine that the driver shows; 0 without a driver, without a GPU or in a build without CUDA. Error(kUsage)
/// where there are some that cannot be used, so that nothing falls back to the CPU unnoticed.
int cuda_devices();
/// The shape of `kind` without memory.
std::unique_ptr<Device> make_dry_device(DeviceKind kind);

}  // namespace optimus
