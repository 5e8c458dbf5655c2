// cuDNN's frontend (headers only) made to call the library that was found at run time: while its headers are read, the
// name of each function that they call stands for the pointer to it. A name that is forgotten here does not link.
//
// The frontend's own way of opening libraries (NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING) also opens a libcudart, of CUDA
// 12 before 13, and calls that one, while this program holds its CUDA runtime in itself and needs no other.
//
// The headers take long to compile: one file includes this one, before anything that includes them.
#pragma once

// The true declarations come first.
#include <nvrtc.h>

#include <cudnn.h>

#include "optimus/ops/cuda/cudnn_library.h"

#define cudnnGetVersion ::optimus::cuda::cudnn().cudnnGetVersion
#define cudnnGetErrorString ::optimus::cuda::cudnn().cudnnGetErrorString
#define cudnnGetLastErrorString ::optimus::cuda::cudnn().cudnnGetLastErrorString
#define cudnnCreate ::optimus::cuda::cudnn().cudnnCreate
#define cudnnDestroy ::optimus::cuda::cudnn().cudnnDestroy
#define cudnnSetStream ::optimus::cuda::cudnn().cudnnSetStream
#define cudnnGetStream ::optimus::cuda::cudnn().cudnnGetStream
#define cudnnBackendCreateDescriptor ::optimus::cuda::cudnn().cudnnBackendCreateDescriptor
#define cudnnBackendDestroyDescriptor ::optimus::cuda::cudnn().cudnnBackendDestroyDescriptor
#define cudnnBackendSetAttribute ::optimus::cuda::cudnn().cudnnBackendSetAttribute
#define cudnnBackendGetAttribute ::optimus::cuda::cudnn().cudnnBackendGetAttribute
#define cudnnBackendFinalize ::optimus::cuda::cudnn().cudnnBackendFinalize
#define cudnnBackendExecute ::optimus::cuda::cudnn().cudnnBackendExecute
// What the headers mention but attention never reaches (an optimiser drops some of it, an unoptimised build does not)
// always fails: filters of integer convolutions, and kernels that the frontend itself compiles, which are for a
// normalisation on GPUs after Hopper.
#define cudnnCreateFilterDescriptor(...) CUDNN_STATUS_NOT_SUPPORTED
#define cudnnDestroyFilterDescriptor(...) CUDNN_STATUS_NOT_SUPPORTED
#define cudnnSetFilterNdDescriptor(...) CUDNN_STATUS_NOT_SUPPORTED
#define cudnnReorderFilterAndBias(...) CUDNN_STATUS_NOT_SUPPORTED
#define nvrtcCreateProgram(...) NVRTC_ERROR_INTERNAL_ERROR
#define nvrtcDestroyProgram(...) NVRTC_ERROR_INTERNAL_ERROR
#define nvrtcCompileProgram(...) NVRTC_ERROR_INTERNAL_ERROR
#define nvrtcGetProgramLogSize(...) NVRTC_ERROR_INTERNAL_ERROR
#define nvrtcGetProgramLog(...) NVRTC_ERROR_INTERNAL_ERROR
#define nvrtcGetCUBINSize(...) NVRTC_ERROR_INTERNAL_ERROR
#define nvrtcGetCUBIN(...) NVRTC_ERROR_INTERNAL_ERROR

#include <cudnn_frontend.h>

#undef cudnnGetVersion
#undef cudnnGetErrorString
#undef cudnnGetLastErrorString
#undef cudnnCreate
#undef cudnnDestroy
#undef cudnnSetStream
#undef cudnnGetStream
#undef cudnnBackendCreateDescriptor
#undef cudnnBackendDestroyDescriptor
#undef cudnnBackendSetAttribute
#undef cudnnBackendGetAttribute
#undef cudnnBackendFinalize
#undef cudnnBackendExecute
#undef cudnnCreateFilterDescriptor
#undef cudnnDestroyFilterDescriptor
#undef cudnnSetFilterNdDescriptor
#undef cudnnReorderFilterAndBias
#undef nvrtcCreateProgram
#undef nvrtcDestroyProgram
#undef nvrtcCompileProgram
#undef nvrtcGetProgramLogSize
#undef nvrtcGetProgramLog
#undef nvrtcGetCUBINSize
#undef nvrtcGetCUBIN
