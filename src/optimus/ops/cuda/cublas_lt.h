// cuBLASLt's functions, found at run time. For CUDA sources only.
//
// Its header initialises descriptors by inline functions, which add the descriptor's size to the arguments of a
// function named ..._internal: that is the one to call here.
#pragma once

#include <cublasLt.h>

#include "optimus/tensor/cuda/library.h"

namespace optimus::cuda {

#define OPTIMUS_CUBLAS_LT_FUNCTIONS(X)     \
  X(cublasLtGetVersion)                    \
  X(cublasLtGetStatusName)                 \
  X(cublasLtCreate)                        \
  X(cublasLtDestroy)                       \
  X(cublasLtMatmulDescInit_internal)       \
  X(cublasLtMatmulDescSetAttribute)        \
  X(cublasLtMatrixLayoutInit_internal)     \
  X(cublasLtMatmulPreferenceInit_internal) \
  X(cublasLtMatmulPreferenceSetAttribute)  \
  X(cublasLtMatmulAlgoGetHeuristic)        \
  X(cublasLtMatmulAlgoCapGetAttribute)     \
  X(cublasLtMatmul)

struct CublasLt {
  CublasLt();
  OPTIMUS_CUBLAS_LT_FUNCTIONS(OPTIMUS_LIBRARY_FUNCTION)
};

/// Loads the library the first time. Throws Error(kUsage) with one sentence where there is none.
const CublasLt& cublas_lt();

}  // namespace optimus::cuda
