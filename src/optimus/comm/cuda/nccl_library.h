// NCCL's functions, found at run time. For CUDA sources only.
#pragma once

#include <nccl.h>

#include "optimus/tensor/cuda/library.h"

namespace optimus::cuda {

#define OPTIMUS_NCCL_FUNCTIONS(X) \
  X(ncclGetVersion)               \
  X(ncclGetUniqueId)              \
  X(ncclGetErrorString)           \
  X(ncclGetLastError)             \
  X(ncclCommInitRankConfig)       \
  X(ncclCommSplit)                \
  X(ncclCommDestroy)              \
  X(ncclCommGetAsyncError)        \
  X(ncclGroupStart)               \
  X(ncclGroupEnd)                 \
  X(ncclAllReduce)                \
  X(ncclBroadcast)                \
  X(ncclReduceScatter)            \
  X(ncclAllGather)                \
  X(ncclSend)                     \
  X(ncclRecv)

struct Nccl {
  Nccl();
  OPTIMUS_NCCL_FUNCTIONS(OPTIMUS_LIBRARY_FUNCTION)
};

/// Loads the library the first time. Throws Error(kUsage) with one sentence where there is none, or one that is too old
/// or of another major version than the build's.
const Nccl& nccl();

}  // namespace optimus::cuda
