#include "optimus/ops/cuda/cublas_lt.h"

#include "optimus/base/log.h"

namespace optimus::cuda {

CublasLt::CublasLt() {
  const Library library("libcublasLt.so.13", "NVIDIA's cuBLASLt of CUDA 13, for products of matrices on a GPU");
  OPTIMUS_CUBLAS_LT_FUNCTIONS(OPTIMUS_FIND_IN_LIBRARY)
  log().debug("cuBLASLt {} ({}), built for cuBLASLt {}", cublasLtGetVersion(), library.path(), CUBLAS_VERSION);
}

const CublasLt& cublas_lt() {
  static const CublasLt functions;
  return functions;
}

}  // namespace optimus::cuda
