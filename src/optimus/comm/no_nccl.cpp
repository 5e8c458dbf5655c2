// What a build without CUDA answers; make_cuda_device() has refused before.
#include "optimus/comm/communicator.h"

namespace optimus {

std::unique_ptr<Communicator> make_nccl_communicator(Processes&, Device&, const std::string& name,
                                                     const std::vector<int>&, Messages) {
  fail(ErrorKind::kUsage, "group {} over GPUs: this program was built without CUDA", name);
}

}  // namespace optimus
