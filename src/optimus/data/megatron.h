// Megatron's indexed data set: PREFIX.bin holds the ids of all documents end to end, PREFIX.idx (little-endian)
// their bounds:
//
//   "MMIDIDX\0\0"  u64 version = 1  u8 type code  u64 sequences N  u64 document indices M
//   i32 sizes[N] in tokens   i64 pointers[N] in bytes   i64 document indices[M]: first sequence of each document, N
//
// Type codes: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 6 float64, 7 float32, 8 uint16. A long document may be
// several sequences. Source: megatron/core/datasets/indexed_dataset.py.
#pragma once

#include <span>

#include "optimus/base/file.h"
#include "optimus/data/token_layout.h"

namespace optimus {

/// `path` without the ending .bin or .idx, if it has one.
std::string megatron_prefix(const std::string& path);

/// Checks the whole index against itself and against the .bin file's size before anything is read through it.
/// Error(kData) when they disagree, or when the sequences do not lie end to end.
TokenLayout read_megatron_index(const fs::path& index_path, const MappedFile& bin);

/// Streams documents into PREFIX.bin and PREFIX.idx: uint16 when every id of the vocabulary fits, else int32. The files
/// are written beside their names and appear, complete and flushed, in finish(); a writer that is destroyed before that
/// leaves nothing behind. Keeps 12 bytes a document in memory.
class MegatronWriter {
 public:
  MegatronWriter(const std::string& out, int64_t vocab);
  ~MegatronWriter();
  MegatronWriter(const MegatronWriter&) = delete;
  MegatronWriter& operator=(const MegatronWriter&) = delete;

  /// Adds ids, all in [0, vocab), to the current document.
  void append(std::span<const int32_t> ids);
  void end_document();
  /// Error(kData) when there is nothing to write.
  void finish();

  const std::string& prefix() const { return prefix_; }
  TokenType type() const { return type_; }
  int64_t documents() const { return int64_t(document_indices_.size()) - 1; }
  int64_t tokens() const { return tokens_; }

 private:
  void write_index();

  std::string prefix_;
  int64_t vocab_;
  TokenType type_;
  OutputFile bin_;
  int64_t tokens_ = 0;
  int32_t sequence_tokens_ = 0;  ///< of the sequence being written
  std::vector<int32_t> sequence_sizes_;
  std::vector<int64_t> document_indices_{0};
  std::vector<uint16_t> narrow_;  ///< scratch of append()
  bool finished_ = false;
};

}  // namespace optimus
