// Shared libraries opened when they are first needed, not linked: the program starts where they are missing, and what needs
// one says so. A library's functions are a struct of pointers, typed by its header and named as there:
//
//   #define FUNCTIONS(X) X(ncclSend) X(ncclRecv)
//   struct Nccl { FUNCTIONS(OPTIMUS_LIBRARY_FUNCTION) };
//   Nccl::Nccl() { const Library library("libnccl.so.2", "..."); FUNCTIONS(OPTIMUS_FIND_IN_LIBRARY) }
//
// An opened library stays until the process ends: those of CUDA leave threads and handlers behind.
#pragma once

#include <string>

namespace optimus::cuda {

class Library {
 public:
  /// `soname` as the dynamic loader knows it; `purpose` says what it is and what for. Throws Error(kUsage) with one
  /// sentence where it cannot be loaded.
  Library(const char* soname, const char* purpose);

  /// Throws Error(kUsage) where the library has no such function.
  template <typename Function>
  void find(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(address_of(name));
  }
  /// Of the file that was found.
  std::string path() const;

 private:
  void* address_of(const char* name) const;

  const char* soname_;
  const char* purpose_;
  void* handle_;
};

#define OPTIMUS_LIBRARY_FUNCTION(name) decltype(&::name) name = nullptr;
#define OPTIMUS_FIND_IN_LIBRARY(name) library.find(#name, name);

}  // namespace optimus::cuda
