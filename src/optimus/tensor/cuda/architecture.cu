// Whether this program holds machine code for a GPU: a kernel's attributes can be asked for only then.
#include "optimus/tensor/cuda/cuda_device.h"

namespace optimus::cuda {
namespace {
__global__ void probe() {}
}  // namespace

bool has_kernels_for_current_device() {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe));
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    return false;
  }
  OPTIMUS_CUDA(status);
  return true;
}

}  // namespace optimus::cuda
