// Token files made at run time, and the errors they should raise.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "optimus/base/error.h"
#include "optimus/base/file.h"

namespace optimus {

/// A folder of its own, removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = fs::temp_directory_path() / "optimus-data-XXXXXX";
    if (!mkdtemp(name.data())) throw std::runtime_error("cannot make " + name);
    path_ = name;
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

inline void write_bytes(const std::string& path, std::string_view bytes) {
  fs::remove(path);  // some file systems flush a file that is truncated and rewritten
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}

/// The values as they lie in memory, or with each one's bytes reversed.
template <typename T>
std::string bytes_of(const std::vector<T>& values, bool swapped = false) {
  std::string bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  for (size_t i = 0; swapped && i < bytes.size(); i += sizeof(T)) std::reverse(&bytes[i], &bytes[i] + sizeof(T));
  return bytes;
}

/// A .npy of format version 1, 2 or 3 around raw elements, padded as numpy pads: elements start at a multiple of 64.
inline std::string npy_bytes(const std::string& type, const std::string& shape, const std::string& elements,
                             int version = 1, const std::string& fortran_order = "False") {
  std::string dict = "{'descr': '" + type + "', 'fortran_order': " + fortran_order + ", 'shape': " + shape + ", }";
  const size_t length_bytes = version == 1 ? 2 : 4;
  while ((8 + length_bytes + dict.size() + 1) % 64 != 0) dict.push_back(' ');
  dict.push_back('\n');
  std::string bytes = "\x93NUMPY";
  bytes.push_back(char(version));
  bytes.push_back(0);
  for (size_t i = 0; i < length_bytes; ++i) bytes.push_back(char(dict.size() >> (8 * i) & 0xFF));
  return bytes + dict + elements;
}

/// Runs f, which must throw an Error of that kind whose message has all the fragments.
template <typename F>
void expect_error(ErrorKind kind, std::initializer_list<std::string> fragments, const F& f) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_EQ(int(error.kind()), int(kind)) << error.what();
    for (const std::string& fragment : fragments)
      EXPECT_NE(std::string(error.what()).find(fragment), std::string::npos) << error.what() << "\nlacks " << fragment;
    return;
  }
  ADD_FAILURE() << "no error";
}

}  // namespace optimus
