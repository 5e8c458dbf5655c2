# How the CUDA backend is compiled and linked.
function(optimus_add_cuda target)
  set(flags --expt-relaxed-constexpr --expt-extended-lambda -lineinfo -Xcompiler=-Wall,-Wextra,-Wno-unused-parameter
    -Wno-deprecated-gpu-targets)
  foreach(architecture ${OPTIMUS_CUDA_ARCHITECTURES})
    list(APPEND flags -gencode=arch=compute_${architecture},code=sm_${architecture})
  endforeach()
  if(OPTIMUS_WERROR)
    list(APPEND flags -Werror=all-warnings)
  endif()
  # nvcc's own warnings as errors are its front end's; ptxas's (serialised wgmma: C7510, ignored setmaxnreg: C7508, spilled
  # registers) are warnings of another tool.
  list(APPEND flags -Xptxas=--warning-as-error,--warn-on-spills)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
  if("90a" IN_LIST OPTIMUS_CUDA_ARCHITECTURES)
    target_compile_definitions(${target} PUBLIC OPTIMUS_HOPPER_KERNELS=1)
  endif()
  # fmt 9 takes nvcc for a compiler without constexpr, but calls its functions in constant expressions.
  target_compile_definitions(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:FMT_USE_CONSTEXPR=1>)
  # CUTLASS's asserts in kernels would make ptxas serialise wgmma.
  target_compile_definitions(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:NDEBUG>)
  list(JOIN OPTIMUS_CUDA_ARCHITECTURES " " architectures)
  # Public, because users of the precompiled header need the same macros.
  target_compile_definitions(${target} PUBLIC OPTIMUS_HAS_CUDA=1 OPTIMUS_CUDA_ARCHITECTURES="${architectures}")
  # Of CUDA's libraries only the runtime is linked, statically. The others are opened when they are first needed, so that
  # the program starts without them; a program that runs where it was built finds the toolkit's.
  target_link_libraries(${target} PRIVATE CUDA::cudart_static ${CMAKE_DL_LIBS} cuDNN::headers NCCL::headers
    CudnnFrontend::headers CUTLASS::headers CUDA::nvtx3)
  target_link_options(${target} INTERFACE "LINKER:-rpath,${CUDAToolkit_LIBRARY_DIR}")
endfunction()
