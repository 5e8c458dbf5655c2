# CudnnFrontend::headers, from a system's folder or the PyPI wheel nvidia-cudnn-frontend in OPTIMUS_PYTHON_PACKAGES (see
# tools/install_cuda_headers.sh).
find_path(CudnnFrontend_INCLUDE_DIR cudnn_frontend.h HINTS ${OPTIMUS_PYTHON_PACKAGES} PATH_SUFFIXES include)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CudnnFrontend REQUIRED_VARS CudnnFrontend_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "run tools/install_cuda_headers.sh, or set CudnnFrontend_INCLUDE_DIR")
if(CudnnFrontend_FOUND AND NOT TARGET CudnnFrontend::headers)
  add_library(CudnnFrontend::headers INTERFACE IMPORTED)
  target_include_directories(CudnnFrontend::headers SYSTEM INTERFACE ${CudnnFrontend_INCLUDE_DIR})
endif()
