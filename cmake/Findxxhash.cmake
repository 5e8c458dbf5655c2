# xxHash as a header (its user defines XXH_INLINE_ALL). Defines xxhash::headers.
find_path(xxhash_INCLUDE_DIR xxhash.h)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(xxhash REQUIRED_VARS xxhash_INCLUDE_DIR)
if(xxhash_FOUND AND NOT TARGET xxhash::headers)
  add_library(xxhash::headers INTERFACE IMPORTED)
  set_target_properties(xxhash::headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${xxhash_INCLUDE_DIR})
endif()
