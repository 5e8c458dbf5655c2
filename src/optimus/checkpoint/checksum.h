// XXH3, 64 bits, in hexadecimal: the checksum of every tensor in a checkpoint.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace optimus {

/// A checksum of bytes that arrive in pieces.
class Checksum {
 public:
  Checksum();
  void add(std::span<const std::byte> bytes);
  /// 16 lower-case hexadecimal digits.
  std::string hex() const;

 private:
  struct State;
  struct Free {
    void operator()(State* state) const;
  };
  std::unique_ptr<State, Free> state_;
};

std::string checksum_of(std::span<const std::byte> bytes);

}  // namespace optimus
