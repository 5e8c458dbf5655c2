#include "optimus/data/megatron.h"

#include <bit>
#include <cstring>
#include <string_view>
#include <utility>

#include "optimus/base/error.h"

namespace optimus {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kMagic{"MMIDIDX\0\0", 9};
constexpr int64_t kVersionAt = 9, kTypeAt = 17, kSequencesAt = 18, kDocumentsAt = 26, kHeaderBytes = 34;
constexpr int64_t kSequenceBytes = sizeof(int32_t) + sizeof(int64_t);
/// Sizes are int32: a document that is longer continues in another sequence.
constexpr int32_t kLongestSequence = 1 << 30;
constexpr std::string_view kBin = ".bin", kIndex = ".idx", kPartial = ".partial";

/// Value `i` of an array at a byte offset, aligned or not.
template <typename T>
T load(const MappedFile& file, int64_t offset, int64_t i = 0) {
  T value;
  std::memcpy(&value, file.data() + offset + i * int64_t(sizeof(T)), sizeof(T));
  return value;
}

template <typename... Args>
void check(bool condition, const MappedFile& index, fmt::format_string<Args...> format, Args&&... args) {
  if (condition) return;
  fail(ErrorKind::kData, "{}: {}: the file is truncated, damaged or belongs to another .bin; copy or tokenize it again",
       index.path().string(), fmt::format(format, std::forward<Args>(args)...));
}

TokenType type_of_code(int code, const MappedFile& index) {
  switch (code) {
    case 1: return {.bytes = 1, .is_signed = false};
    case 2: return {.bytes = 1, .is_signed = true};
    case 3: return {.bytes = 2, .is_signed = true};
    case 4: return {.bytes = 4, .is_signed = true};
    case 5: return {.bytes = 8, .is_signed = true};
    case 8: return {.bytes = 2, .is_signed = false};
    default: check(false, index, "element type {} is not an integer type (1 to 5, or 8)", code);
  }
  return {};
}

int code_of(TokenType type) { return type.bytes == 2 ? 8 : 4; }

void rename_into_place(const fs::path& path) {
  fs::path partial = path;
  partial += kPartial;
  std::error_code code;
  fs::rename(partial, path, code);
  require(!code, ErrorKind::kData, "cannot rename {} to {}: {}", partial.string(), path.string(), code.message());
}

}  // namespace

std::string megatron_prefix(const std::string& path) {
  const bool ends = path.ends_with(kBin) || path.ends_with(kIndex);
  return ends ? path.substr(0, path.size() - kBin.size()) : path;
}

TokenLayout read_megatron_index(const fs::path& index_path, const MappedFile& bin) {
  const MappedFile index(index_path);
  check(index.size() >= kHeaderBytes && std::memcmp(index.data(), kMagic.data(), kMagic.size()) == 0, index,
        "not a Megatron index (no MMIDIDX header)");
  const auto version = load<uint64_t>(index, kVersionAt);
  check(version == 1, index, "version {} is unknown (1 is known)", version);
  TokenLayout layout{.format = "megatron", .type = type_of_code(load<uint8_t>(index, kTypeAt), index)};

  // Divisions instead of products: a damaged count cannot overflow.
  const auto sequence_count = load<uint64_t>(index, kSequencesAt);
  const auto document_count = load<uint64_t>(index, kDocumentsAt);
  const auto body = uint64_t(index.size() - kHeaderBytes);
  const bool whole = sequence_count <= body / kSequenceBytes &&
                     document_count <= (body - sequence_count * kSequenceBytes) / sizeof(int64_t) &&
                     sequence_count * kSequenceBytes + document_count * sizeof(int64_t) == body;
  check(whole, index, "{} sequences and {} document indices do not make its {} bytes", sequence_count, document_count,
        index.size());

  const auto sequences = int64_t(sequence_count), documents = int64_t(document_count);
  const int64_t sizes_at = kHeaderBytes;
  const int64_t pointers_at = sizes_at + sequences * int64_t(sizeof(int32_t));
  const int64_t documents_at = pointers_at + sequences * int64_t(sizeof(int64_t));
  int64_t end = 0;  // in bytes; within the .bin after every check, so it cannot overflow
  for (int64_t i = 0; i < sequences; ++i) {
    const auto size = load<int32_t>(index, sizes_at, i);
    const auto pointer = load<int64_t>(index, pointers_at, i);
    check(size >= 0 && pointer == end, index,
          "sequence {} has {} tokens at byte {}, but the one before it ends at byte {}", i, size, pointer, end);
    end += int64_t(size) * layout.type.bytes;
    check(end <= bin.size(), index, "sequence {} ends at byte {}, but {} has {} bytes", i, end, bin.path().string(),
          bin.size());
  }
  check(end == bin.size(), index, "its sequences take {} bytes, but {} has {}", end, bin.path().string(), bin.size());

  int64_t previous = 0;
  for (int64_t i = 0; i < documents; ++i) {
    const auto first = load<int64_t>(index, documents_at, i);
    check(first >= previous && first <= sequences, index, "document {} starts at sequence {} of {}, after {}", i, first,
          sequences, previous);
    previous = first;
  }
  if (documents > 0 && previous == sequences) layout.documents = documents - 1;  // other writers leave the end out
  layout.tokens = end / layout.type.bytes;
  layout.shape = {layout.tokens};
  return layout;
}

MegatronWriter::MegatronWriter(const std::string& out, int64_t vocab)
    : prefix_(megatron_prefix(out)),
      vocab_(vocab),
      type_(vocab <= 65536 ? TokenType{.bytes = 2, .is_signed = false} : TokenType{.bytes = 4, .is_signed = true}),
      bin_(fmt::format("{}{}{}", prefix_, kBin, kPartial)) {}

MegatronWriter::~MegatronWriter() {
  if (finished_) return;
  std::error_code ignored;  // the failure that brought us here is the one to report
  for (const std::string_view ending : {kBin, kIndex})
    fs::remove(fmt::format("{}{}{}", prefix_, ending, kPartial), ignored);
}

void MegatronWriter::append(std::span<const int32_t> ids) {
  for (const int32_t id : ids) expects(id >= 0 && id < vocab_, "token {} is outside the vocabulary of {}", id, vocab_);
  while (!ids.empty()) {
    const auto piece = ids.first(std::min(ids.size(), size_t(kLongestSequence - sequence_tokens_)));
    if (type_.bytes == 2) {
      narrow_.assign(piece.begin(), piece.end());
      bin_.write(narrow_.data(), narrow_.size() * sizeof(uint16_t));
    } else {
      bin_.write(piece.data(), piece.size_bytes());
    }
    tokens_ += int64_t(piece.size());
    sequence_tokens_ += int32_t(piece.size());
    if (sequence_tokens_ == kLongestSequence) sequence_sizes_.push_back(std::exchange(sequence_tokens_, 0));
    ids = ids.subspan(piece.size());
  }
}

void MegatronWriter::end_document() {
  if (sequence_tokens_ > 0) sequence_sizes_.push_back(std::exchange(sequence_tokens_, 0));
  document_indices_.push_back(int64_t(sequence_sizes_.size()));
}

void MegatronWriter::write_index() {
  OutputFile index(fmt::format("{}{}{}", prefix_, kIndex, kPartial));
  const auto put = [&](auto value) { index.write(&value, sizeof(value)); };
  index.write(kMagic);
  put(uint64_t(1));
  put(uint8_t(code_of(type_)));
  put(uint64_t(sequence_sizes_.size()));
  put(uint64_t(document_indices_.size()));
  index.write(sequence_sizes_.data(), sequence_sizes_.size() * sizeof(int32_t));
  int64_t pointer = 0;
  for (const int32_t size : sequence_sizes_) {
    put(pointer);
    pointer += int64_t(size) * type_.bytes;
  }
  index.write(document_indices_.data(), document_indices_.size() * sizeof(int64_t));
  index.close();
}

void MegatronWriter::finish() {
  expects(sequence_tokens_ == 0, "the last document has no end");
  require(tokens_ > 0, ErrorKind::kData, "there are no documents to write to {}{}", prefix_, kBin);
  bin_.close();
  write_index();
  // The index first: a reader that comes in between finds no .bin, or an old one whose size does not match. A .bin
  // alone would pass for headerless ids.
  const fs::path index = prefix_ + std::string(kIndex);
  rename_into_place(index);
  rename_into_place(prefix_ + std::string(kBin));
  sync_folder(index.has_parent_path() ? index.parent_path() : fs::path("."));
  finished_ = true;
}

}  // namespace optimus
