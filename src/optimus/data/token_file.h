// A file of token ids, memory-mapped and read flat, in order, whatever its format and shape:
//
//   npy       a real .npy: any integer type, either byte order, any shape in C order
//   raw_u16   headerless little-endian uint16, as OLMo writes them (and names them .npy)
//   raw_u32   headerless little-endian uint32
//   megatron  PREFIX.bin and PREFIX.idx
//   auto      by what is there: a .bin with an .idx beside it is megatron; a file with an .npy header is npy; other
//             .npy, .bin, .u16 and .raw files are raw_u16, .u32 files raw_u32
//
// A path may be given without its ending; two files that would fit are an error.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "optimus/base/file.h"
#include "optimus/data/token_layout.h"

namespace optimus {

class TokenFile {
 public:
  /// Ids are int32: without a vocabulary, everything an int32 holds from 0.
  static constexpr int64_t kAnyVocab = int64_t{1} << 31;

  /// Error(kData), naming the file and what to do, when it is missing, empty, truncated or damaged.
  explicit TokenFile(const std::string& path, const std::string& format = "auto", int64_t vocab = kAnyVocab);

  int64_t size() const { return layout_.tokens; }
  /// Ids [begin, begin + count) into `out`. Error(kData) naming file, byte and id where one is outside [0, vocab).
  /// Safe to call from several threads.
  void read(int64_t begin, int64_t count, int32_t* out) const;

  /// The file that holds the ids (the .bin of a pair).
  const fs::path& path() const { return file_.path(); }
  const std::string& format_name() const { return layout_.format; }
  std::string dtype_name() const { return name_of(layout_.type); }
  const std::vector<int64_t>& shape() const { return layout_.shape; }
  std::optional<int64_t> documents() const { return layout_.documents; }

 private:
  struct Located;
  static Located locate(const std::string& path, const std::string& format);
  TokenFile(const Located& located, int64_t vocab);

  MappedFile file_;
  TokenLayout layout_;
  int64_t vocab_;
};

/// What `optimus inspect` prints. Reads the whole file once, for the largest id.
nlohmann::ordered_json describe_token_file(const std::string& path, const std::string& format = "auto");

}  // namespace optimus
