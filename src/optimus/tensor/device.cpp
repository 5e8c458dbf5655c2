#include "optimus/tensor/device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <fstream>

namespace optimus {
namespace {

/// Of a device that computes while it is asked to.
class HostMoment final : public Moment {
 public:
  double seconds_since_wait(const Moment& earlier) const override {
    return std::chrono::duration<double>(time_ - dynamic_cast<const HostMoment&>(earlier).time_).count();
  }

 private:
  std::chrono::steady_clock::time_point time_ = std::chrono::steady_clock::now();
};

class CpuDevice final : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::cpu; }
  int64_t capacity() const override {
    const int64_t installed = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    std::ifstream container("/sys/fs/cgroup/memory.max");  // "max" or bytes
    int64_t limit = 0;
    return container >> limit && limit > 0 ? std::min(installed, limit) : installed;
  }

  void* allocate(int64_t bytes) override {
    if (bytes == 0) bytes = 1;
    void* data = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require(data != MAP_FAILED, ErrorKind::kMemory, "the system refused {:.2f} GiB of memory: {}",
            double(bytes) / 0x1p30, std::strerror(errno));
    madvise(data, size_t(bytes), MADV_HUGEPAGE);
    return data;
  }
  void release(void* data, int64_t bytes) override { munmap(data, size_t(bytes == 0 ? 1 : bytes)); }
  void from_host(Tensor to, const void* from) override {
    if (to.bytes() > 0) std::memcpy(to.data, from, size_t(to.bytes()));  // nothing may come from nowhere
  }
  void to_host_wait(void* to, Tensor from) override {
    if (from.bytes() > 0) std::memcpy(to, from.data, size_t(from.bytes()));
  }
};

class DryDevice final : public Device {
 public:
  explicit DryDevice(DeviceKind kind) : kind_(kind) {}
  DeviceKind kind() const override { return kind_; }
  bool dry() const override { return true; }
  int64_t capacity() const override { return 0; }

  void* allocate(int64_t bytes) override {
    const uintptr_t address = next_;
    next_ += uintptr_t((bytes + 4095) / 4096 * 4096 + 4096);
    return reinterpret_cast<void*>(address);
  }
  void release(void*, int64_t) override {}
  void from_host(Tensor, const void*) override {}
  void to_host_wait(void* to, Tensor from) override { std::memset(to, 0, size_t(from.bytes())); }

 private:
  DeviceKind kind_;
  uintptr_t next_ = uintptr_t(1) << 56;  // not canonical on x86-64: a stray access faults
};

}  // namespace

std::unique_ptr<Moment> Device::moment() { return std::make_unique<HostMoment>(); }

std::unique_ptr<Device> make_cpu_device() { return std::make_unique<CpuDevice>(); }
std::unique_ptr<Device> make_dry_device(DeviceKind kind) { return std::make_unique<DryDevice>(kind); }

}  // namespace optimus
