// The backends that the table of kernel cases runs on, and the fixture for it: a suite is written once,
//   using MatmulTest = OpsTest;  OPTIMUS_ON_EVERY_BACKEND(MatmulTest);  TEST_P(MatmulTest, ...) { ops().matmul(...); }
#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "optimus/ops/ops.h"
#include "optimus/tensor/device.h"
#include "support/host_tensor.h"

namespace optimus::test {

struct Backend {
  std::string name;
  std::unique_ptr<Device> (*make_device)();
  std::unique_ptr<Ops> (*make_ops)(Device&);
};

/// The CPU, and the GPU where this build and this machine have one.
inline std::vector<Backend> backends() {
  std::vector<Backend> out{{"cpu", make_cpu_device, [](Device&) { return make_cpu_ops(); }}};
  if (cuda_devices() > 0)
    out.push_back(
        {"cuda", [] { return make_cuda_device(0); }, [](Device& device) { return make_cuda_ops(device, true); }});
  return out;
}

inline void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }

class OpsTest : public ::testing::TestWithParam<Backend> {
 protected:
  Device& device() { return *device_; }
  Ops& ops() { return *ops_; }

 private:
  std::unique_ptr<Device> device_ = GetParam().make_device();
  std::unique_ptr<Ops> ops_ = GetParam().make_ops(*device_);
};

}  // namespace optimus::test

#define OPTIMUS_ON_EVERY_BACKEND(suite)                                      \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, ::testing::ValuesIn(backends()), \
                           [](const auto& backend) { return backend.param.name; })
