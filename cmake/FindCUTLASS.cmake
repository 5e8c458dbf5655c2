# CUTLASS::headers, from a system's folder or the PyPI wheel nvidia-cutlass in OPTIMUS_PYTHON_PACKAGES (see
# tools/install_cuda_headers.sh).
find_path(CUTLASS_INCLUDE_DIR cutlass/cutlass.h
  HINTS ${OPTIMUS_PYTHON_PACKAGES} PATH_SUFFIXES cutlass_library/source/include)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CUTLASS REQUIRED_VARS CUTLASS_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "run tools/install_cuda_headers.sh, or set CUTLASS_INCLUDE_DIR")
if(CUTLASS_FOUND AND NOT TARGET CUTLASS::headers)
  add_library(CUTLASS::headers INTERFACE IMPORTED)
  target_include_directories(CUTLASS::headers SYSTEM INTERFACE ${CUTLASS_INCLUDE_DIR})
endif()
