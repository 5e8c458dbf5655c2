#include "optimus/train/tensorboard.h"

#include <array>
#include <bit>
#include <chrono>

#include <fmt/format.h>

namespace optimus {
namespace {

static_assert(std::endian::native == std::endian::little, "the file's integers and floats are little-endian");

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78u : 0u);
    table[byte] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kCrcTable = make_crc_table();

template <typename T>
void append_raw(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

uint32_t masked_crc32c(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8u; }

// Protobuf: a field is the varint (number << 3 | wire type) and its value.
enum WireType : uint64_t { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

void append_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out.push_back(char(value | 0x80));
  out.push_back(char(value));
}

void append_tag(std::string& out, uint64_t field, WireType type) { append_varint(out, field << 3 | type); }

void append_integer(std::string& out, uint64_t field, int64_t value) {
  append_tag(out, field, kVarint);
  append_varint(out, uint64_t(value));
}

void append_double(std::string& out, uint64_t field, double value) {
  append_tag(out, field, kFixed64);
  append_raw(out, value);
}

void append_float(std::string& out, uint64_t field, float value) {
  append_tag(out, field, kFixed32);
  append_raw(out, value);
}

void append_bytes(std::string& out, uint64_t field, std::string_view bytes) {
  append_tag(out, field, kLengthDelimited);
  append_varint(out, bytes.size());
  out.append(bytes);
}

double seconds_since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string event(int64_t step, uint64_t content_field, std::string_view content) {
  std::string out;
  append_double(out, 1, seconds_since_epoch());
  append_integer(out, 2, step);
  append_bytes(out, content_field, content);
  return out;
}

/// TensorBoard takes any name that contains "tfevents" and reads a folder's files in the names' order, so the time
/// comes first; the number keeps two writers of one second apart.
fs::path unused_path(const fs::path& run_dir) {
  const auto second = int64_t(seconds_since_epoch());
  for (int number = 0;; ++number) {
    fs::path path = run_dir / fmt::format("events.out.tfevents.{:010}.{:03}.optimus", second, number);
    if (!fs::exists(path)) return path;
  }
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0u;
  for (const char byte : bytes) crc = kCrcTable[(crc ^ uint8_t(byte)) & 0xFF] ^ (crc >> 8);
  return ~crc;
}

TensorBoardWriter::TensorBoardWriter(const fs::path& run_dir, int64_t resumed_from)
    : path_(unused_path(run_dir)), file_(path_) {
  write_record(event(0, 3, "brain.Event:2"));
  std::string session_start;
  append_integer(session_start, 1, 1);
  write_record(event(resumed_from + 1, 7, session_start));
  flush();
}

void TensorBoardWriter::add(int64_t step, std::string_view tag, double value) {
  std::string point, summary;
  append_bytes(point, 1, tag);
  append_float(point, 2, float(value));
  append_bytes(summary, 1, point);
  write_record(event(step, 5, summary));
}

void TensorBoardWriter::flush() { file_.flush(); }

void TensorBoardWriter::write_record(std::string_view payload) {
  std::string record;
  append_raw(record, uint64_t(payload.size()));
  append_raw(record, masked_crc32c(record));
  record.append(payload);
  append_raw(record, masked_crc32c(payload));
  file_.write(record);
}

}  // namespace optimus
