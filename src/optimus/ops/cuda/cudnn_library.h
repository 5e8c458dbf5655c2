// cuDNN's functions, found at run time. For CUDA sources only.
#pragma once

#include <string>

#include <cudnn.h>

#include "optimus/tensor/cuda/library.h"

namespace optimus::cuda {

// Ours and those of its frontend's headers, which are renamed in cudnn_frontend.h.
#define OPTIMUS_CUDNN_FUNCTIONS(X) \
  X(cudnnGetVersion)               \
  X(cudnnGetCudartVersion)         \
  X(cudnnGetErrorString)           \
  X(cudnnGetLastErrorString)       \
  X(cudnnCreate)                   \
  X(cudnnDestroy)                  \
  X(cudnnSetStream)                \
  X(cudnnGetStream)                \
  X(cudnnBackendCreateDescriptor)  \
  X(cudnnBackendDestroyDescriptor) \
  X(cudnnBackendSetAttribute)      \
  X(cudnnBackendGetAttribute)      \
  X(cudnnBackendFinalize)          \
  X(cudnnBackendExecute)

struct Cudnn {
  Cudnn();
  OPTIMUS_CUDNN_FUNCTIONS(OPTIMUS_LIBRARY_FUNCTION)
};

/// Loads the library the first time. Throws Error(kUsage) with one sentence where it or NVRTC is missing, or where it is
/// older than the headers of the build.
const Cudnn& cudnn();

/// As "9.19.0".
std::string cudnn_version_text(size_t version);

}  // namespace optimus::cuda
