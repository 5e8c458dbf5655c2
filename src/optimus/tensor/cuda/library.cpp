#include "optimus/tensor/cuda/library.h"

#include <dlfcn.h>
#include <link.h>

#include "optimus/base/error.h"

namespace optimus::cuda {

// Local, so that the symbols of one library never stand in for those of another.
Library::Library(const char* soname, const char* purpose)
    : soname_(soname), purpose_(purpose), handle_(dlopen(soname, RTLD_NOW | RTLD_LOCAL)) {
  if (handle_) return;
  const char* reason = dlerror();
  fail(ErrorKind::kUsage,
       "{} ({}) cannot be loaded: install it, put its folder in LD_LIBRARY_PATH, or use run.device = \"cpu\" ({})",
       soname, purpose, reason ? reason : "no reason given");
}

std::string Library::path() const {
  link_map* map = nullptr;
  return dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : soname_;
}

void* Library::address_of(const char* name) const {
  void* address = dlsym(handle_, name);
  require(
      address != nullptr, ErrorKind::kUsage,
      "{} ({}) is too old, it has no {}: put the folder of a newer {} first in LD_LIBRARY_PATH, or use run.device = "
      "\"cpu\"",
      path(), purpose_, name, soname_);
  return address;
}

}  // namespace optimus::cuda
