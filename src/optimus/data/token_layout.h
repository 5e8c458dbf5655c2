// Where the ids of a token file lie and how they are written: what every format's header comes down to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace optimus {

/// An integer type on disk.
struct TokenType {
  int bytes = 2;  ///< 1, 2, 4 or 8
  bool is_signed = false;
  bool big_endian = false;
};

/// numpy's name ("uint16"); little-endian unless it says otherwise.
inline std::string name_of(TokenType type) {
  return fmt::format("{}int{}{}", type.is_signed ? "" : "u", 8 * type.bytes, type.big_endian ? " big-endian" : "");
}

struct TokenLayout {
  std::string format = {};  ///< "npy", "raw_u16", "raw_u32" or "megatron"
  TokenType type = {};
  int64_t offset = 0;  ///< of the first id, in bytes
  int64_t tokens = 0;
  std::vector<int64_t> shape = {};        ///< its product is `tokens`; one dimension for formats without shapes
  std::optional<int64_t> documents = {};  ///< where the file tells
};

}  // namespace optimus
