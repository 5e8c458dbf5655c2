// Scalars for TensorBoard: an event file beside metrics.jsonl, written without protobuf or TensorFlow.
//
// The file is a sequence of records
//   u64 length | u32 masked crc32c(length) | payload | u32 masked crc32c(payload)        little-endian
// with mask(c) = rotate_right(c, 15) + 0xa282ead8. A payload is an Event message, of whose fields these are used:
//   Event      { double wall_time = 1; int64 step = 2; string file_version = 3 | Summary summary = 5 |
//                SessionLog session_log = 7 }
//   Summary    { Value value = 1 { string tag = 1; float simple_value = 2 } }
//   SessionLog { SessionStatus status = 1 }                                              START is 1
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "optimus/base/file.h"

namespace optimus {

/// CRC-32C (Castagnoli): reflected polynomial 0x82F63B78, initial value and final xor of all ones.
uint32_t crc32c(std::string_view bytes);

/// Writes one event file. A resumed run opens a new one, whose opening record makes TensorBoard forget the points that
/// earlier files of the folder hold past `resumed_from`, the number of updates the run already has.
/// Errors are Error(kData) with path and reason.
class TensorBoardWriter {
 public:
  explicit TensorBoardWriter(const fs::path& run_dir, int64_t resumed_from = 0);

  /// Buffers one point; the value is rounded to f32, the format's only width.
  void add(int64_t step, std::string_view tag, double value);
  /// Hands the buffered points to the system. What was not flushed is lost with the writer.
  void flush();

  const fs::path& path() const { return path_; }

 private:
  void write_record(std::string_view payload);

  fs::path path_;
  OutputFile file_;
};

}  // namespace optimus
