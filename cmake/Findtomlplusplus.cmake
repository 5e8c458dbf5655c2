# toml++ as headers only, whatever else the distribution built. Defines tomlplusplus::headers.
find_path(tomlplusplus_INCLUDE_DIR toml++/toml.h)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(tomlplusplus REQUIRED_VARS tomlplusplus_INCLUDE_DIR)
if(tomlplusplus_FOUND AND NOT TARGET tomlplusplus::headers)
  add_library(tomlplusplus::headers INTERFACE IMPORTED)
  set_target_properties(tomlplusplus::headers PROPERTIES INTERFACE_INCLUDE_DIRECTORIES ${tomlplusplus_INCLUDE_DIR}
    INTERFACE_COMPILE_DEFINITIONS TOML_HEADER_ONLY=1)
endif()
