// What a build without CUDA answers.
#include "optimus/tensor/device.h"

namespace optimus {

std::unique_ptr<Device> make_cuda_device(int) {
  fail(ErrorKind::kUsage,
       "this program was built without CUDA: build it with the preset \"cuda\", or use run.device = \"cpu\"");
}
int cuda_devices() { return 0; }

}  // namespace optimus
