// What the checkpoint tests share: a folder that goes with the test, random numbers, and damage done on purpose.
#pragma once

#include <cstdlib>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "optimus/base/error.h"
#include "optimus/base/file.h"

namespace optimus::testing {

/// In memory where the system offers that: these tests flush thousands of small files.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    const fs::path memory = "/dev/shm";
    std::string name =
        ((fs::is_directory(memory) ? memory : fs::temp_directory_path()) / "optimus-checkpoint-XXXXXX").string();
    if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline void write_bytes(const fs::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc).write(bytes.data(), std::streamsize(bytes.size()));
}

inline void flip_byte(const fs::path& path, int64_t offset) {
  std::string bytes = read_text(path);
  bytes[size_t(offset < 0 ? int64_t(bytes.size()) + offset : offset)] ^= 0x10;
  write_bytes(path, bytes);
}

inline std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

/// The message of the Error of that kind that `action` throws; a failed test when it does not.
inline std::string error_of(ErrorKind kind, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(int(error.kind()), int(kind)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return "";
}

#define EXPECT_MENTIONS(text, word) EXPECT_NE((text).find(word), std::string::npos) << (text)

/// One of the mutations that disks, transfers and people make.
inline std::string mutated(std::string bytes, std::mt19937& generator) {
  const auto below = [&](size_t bound) { return size_t(generator() % std::max<size_t>(1, bound)); };
  if (bytes.empty()) return bytes;
  switch (below(6)) {
    case 0: bytes[below(bytes.size())] = char(generator()); break;
    case 1: bytes.resize(below(bytes.size())); break;
    case 2: bytes.erase(below(bytes.size()), 1 + below(16)); break;
    case 3: bytes.insert(below(bytes.size()), std::string(1 + below(64), "[{\"0,-:]}9"[below(10)])); break;
    case 4: bytes.insert(below(bytes.size()), bytes.substr(below(bytes.size()), 1 + below(64))); break;
    default: {  // a digit becomes a large number
      const size_t at = bytes.find_first_of("0123456789", below(bytes.size()));
      if (at != std::string::npos) bytes.replace(at, 1, std::to_string(generator() * 0x100000001ull));
    }
  }
  return bytes;
}

}  // namespace optimus::testing
