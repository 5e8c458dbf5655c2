# cuDNN as headers, from the CUDA toolkit's folders or a package of the system; the program finds the library when it
# runs. Defines cuDNN::headers.
find_path(cuDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(cuDNN REQUIRED_VARS cuDNN_INCLUDE_DIR)
if(cuDNN_FOUND AND NOT TARGET cuDNN::headers)
  add_library(cuDNN::headers INTERFACE IMPORTED)
  set_target_properties(cuDNN::headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${cuDNN_INCLUDE_DIR})
endif()
