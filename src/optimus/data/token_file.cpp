#include "optimus/data/token_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstring>

#include <nlohmann/json.hpp>

#include "optimus/base/error.h"
#include "optimus/data/megatron.h"
#include "optimus/data/npy.h"

namespace optimus {
namespace {

static_assert(std::endian::native == std::endian::little);

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

/// The file that `path` names, its ending completed with the one of `endings` that exists.
std::string complete(const std::string& path, const std::vector<std::string>& endings) {
  if (is_file(path)) return path;
  std::vector<std::string> found;
  for (const std::string& ending : endings)
    if (is_file(path + ending)) found.push_back(path + ending);
  require(!found.empty(), ErrorKind::kData, "cannot find token file {} (nor with one of the endings {})", path,
          fmt::join(endings, " "));
  require(found.size() == 1, ErrorKind::kData, "{} could be any of {}: give the path with its ending", path,
          fmt::join(found, ", "));
  return found.front();
}

/// The format of a file that is no Megatron pair.
std::string detect_format(const MappedFile& file) {
  if (looks_like_npy(file.bytes())) return "npy";
  const std::string ending = file.path().extension();
  if (ending == ".u32") return "raw_u32";
  for (const char* known : {".npy", ".bin", ".u16", ".raw"})
    if (ending == known) return "raw_u16";
  fail(ErrorKind::kData,
       "{}: neither the ending '{}' nor an .npy header tells the token file's format: set format to \"raw_u16\" or "
       "\"raw_u32\", or make token files from text with `optimus tokenize`",
       file.path().string(), ending);
}

TokenLayout raw_layout(const MappedFile& file, const std::string& format) {
  TokenLayout layout{.format = format, .type = {.bytes = format == "raw_u16" ? 2 : 4}};
  require(!looks_like_npy(file.bytes()), ErrorKind::kData,
          "{}: has an .npy header, which format \"{}\" would read as tokens: set format to \"npy\" or \"auto\"",
          file.path().string(), format);
  require(file.size() % layout.type.bytes == 0, ErrorKind::kData,
          "{}: its {} bytes are no whole number of {}-byte tokens: the file is truncated, or its format is not {}",
          file.path().string(), file.size(), layout.type.bytes, format);
  layout.tokens = file.size() / layout.type.bytes;
  layout.shape = {layout.tokens};
  return layout;
}

/// An integer of a file: how to load one from unaligned bytes.
template <std::integral T, bool kSwapped>
struct Element {
  static constexpr int64_t kBytes = sizeof(T);
  static T load(const std::byte* from) {
    std::array<std::byte, sizeof(T)> bytes;
    std::memcpy(bytes.data(), from, sizeof(T));
    if constexpr (kSwapped) std::reverse(bytes.begin(), bytes.end());
    return std::bit_cast<T>(bytes);
  }
};

template <bool kSwapped, typename F>
void visit_width(TokenType type, const F& f) {
  switch (type.bytes) {
    case 1: return type.is_signed ? f(Element<int8_t, kSwapped>{}) : f(Element<uint8_t, kSwapped>{});
    case 2: return type.is_signed ? f(Element<int16_t, kSwapped>{}) : f(Element<uint16_t, kSwapped>{});
    case 4: return type.is_signed ? f(Element<int32_t, kSwapped>{}) : f(Element<uint32_t, kSwapped>{});
    default: return type.is_signed ? f(Element<int64_t, kSwapped>{}) : f(Element<uint64_t, kSwapped>{});
  }
}

/// Calls f with the Element of a type.
template <typename F>
void visit_element(TokenType type, const F& f) {
  type.big_endian ? visit_width<true>(type, f) : visit_width<false>(type, f);
}

/// Negative ids, and unsigned ones past int64, wrap to huge values.
template <std::integral T>
bool inside(T id, int64_t vocab) {
  return uint64_t(int64_t(id)) < uint64_t(vocab);
}

}  // namespace

struct TokenFile::Located {
  std::string tokens;
  std::string index;  ///< of a Megatron pair, else empty
  std::string format;
};

TokenFile::Located TokenFile::locate(const std::string& path, const std::string& format) {
  const auto pair = [](const std::string& prefix) {
    for (const char* ending : {".bin", ".idx"})
      require(is_file(prefix + ending), ErrorKind::kData,
              "cannot find {0}{1}: Megatron data is a pair of files, {0}.bin and {0}.idx", prefix, ending);
    return Located{prefix + ".bin", prefix + ".idx", "megatron"};
  };
  if (format == "megatron") return pair(megatron_prefix(path));
  if (format == "npy") return {complete(path, {".npy"}), "", format};
  if (format == "raw_u16") return {complete(path, {".npy", ".bin", ".u16", ".raw"}), "", format};
  if (format == "raw_u32") return {complete(path, {".npy", ".bin", ".u32", ".raw"}), "", format};
  require(format == "auto", ErrorKind::kUsage,
          "unknown token file format \"{}\": use auto, npy, raw_u16, raw_u32 or megatron", format);

  // An index makes its .bin a pair. Both are candidates as one, so PREFIX.bin is not tried beside PREFIX.idx.
  const bool indexed = is_file(path + ".idx");
  const std::string file = complete(path, {indexed ? ".idx" : ".bin", ".npy", ".u16", ".u32", ".raw"});
  const std::string prefix = megatron_prefix(file);
  if (prefix != file && is_file(prefix + ".idx")) return pair(prefix);
  return {file, "", "auto"};
}

TokenFile::TokenFile(const std::string& path, const std::string& format, int64_t vocab)
    : TokenFile(locate(path, format), vocab) {}

TokenFile::TokenFile(const Located& located, int64_t vocab)
    : file_(located.tokens), vocab_(std::min(vocab, kAnyVocab)) {
  require(file_.size() > 0, ErrorKind::kData, "{}: the file is empty: make it again", path().string());
  const std::string format = located.format == "auto" ? detect_format(file_) : located.format;
  if (format == "megatron") layout_ = read_megatron_index(located.index, file_);
  else if (format == "npy") layout_ = read_npy_header(file_);
  else layout_ = raw_layout(file_, format);
  require(size() > 0, ErrorKind::kData, "{}: the file holds no tokens: make it again", path().string());
}

void TokenFile::read(int64_t begin, int64_t count, int32_t* out) const {
  expects(begin >= 0 && count >= 0 && begin <= size() - count, "tokens {} to {} of {}", begin, begin + count, size());
  // Reading a mapping past the end of a file that was cut ends the process (SIGBUS), without a word.
  std::error_code unknown;
  const auto bytes = fs::file_size(file_.path(), unknown);
  require(!unknown && int64_t(bytes) >= file_.size(), ErrorKind::kData,
          "{} is gone or was cut while in use (it had {} bytes); restore it and start again", file_.path().string(),
          file_.size());
  visit_element(layout_.type, [&](auto element) {
    const int64_t offset = layout_.offset + begin * element.kBytes;
    const std::byte* from = file_.data() + offset;
    bool all_inside = true;
    for (int64_t i = 0; i < count; ++i) {
      const auto id = element.load(from + i * element.kBytes);
      out[i] = int32_t(id);
      all_inside &= inside(id, vocab_);
    }
    for (int64_t i = 0; !all_inside && i < count; ++i) {
      const auto id = element.load(from + i * element.kBytes);
      require(inside(id, vocab_), ErrorKind::kData,
              "{}: token {} at byte {} (number {} of the file, read as {} {}) is outside the vocabulary of {}: the "
              "file is damaged, of another tokenizer (set model.vocab) or of another format (set data.format)",
              path().string(), id, offset + i * element.kBytes, begin + i, format_name(), dtype_name(), vocab_);
    }
  });
}

nlohmann::ordered_json describe_token_file(const std::string& path, const std::string& format) {
  constexpr int64_t kFirstIds = 16, kPiece = 1 << 16;
  const TokenFile file(path, format);
  std::vector<int32_t> ids(size_t(std::min(file.size(), kPiece)));
  file.read(0, std::min(file.size(), kFirstIds), ids.data());
  const std::vector<int32_t> first_ids(ids.begin(), ids.begin() + std::min(file.size(), kFirstIds));
  int32_t max_id = 0;
  for (int64_t begin = 0; begin < file.size(); begin += kPiece) {
    const int64_t count = std::min(kPiece, file.size() - begin);
    file.read(begin, count, ids.data());
    max_id = std::max(max_id, *std::max_element(ids.begin(), ids.begin() + count));
  }
  nlohmann::ordered_json description{
      {"kind", "tokens"},           {"path", file.path().string()}, {"format", file.format_name()},
      {"dtype", file.dtype_name()}, {"shape", file.shape()},        {"tokens", file.size()}};
  if (file.documents()) description["documents"] = *file.documents();
  description["max_id"] = max_id;
  description["first_ids"] = first_ids;
  return description;
}

}  // namespace optimus
