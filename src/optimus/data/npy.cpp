#include "optimus/data/npy.h"

#include <charconv>
#include <cstring>
#include <string_view>

#include "optimus/base/error.h"

namespace optimus {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::string_view kAdvice = "write the file again with numpy.save";

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Reads the literals of the header's dict.
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const fs::path& path) : text_(text), path_(path) {}

  [[noreturn]] void damaged(std::string_view expected) const {
    fail(ErrorKind::kData, "{}: damaged .npy header: expected {} at its character {}; {}", path_.string(), expected,
         at_, kAdvice);
  }

  bool take(char wanted) {
    skip_spaces();
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  void expect(char wanted) {
    if (!take(wanted)) damaged(fmt::format("'{}'", wanted));
  }

  std::string_view string() {
    const char quote = take('\'') ? '\'' : '"';
    if (quote == '"' && !take('"')) damaged("a string");
    const size_t end = text_.find(quote, at_);
    if (end == std::string_view::npos) damaged("the end of a string");
    const std::string_view value = text_.substr(at_, end - at_);
    at_ = end + 1;
    return value;
  }

  bool boolean() {
    skip_spaces();
    for (const std::string_view word : {"True", "False"}) {
      if (!text_.substr(at_).starts_with(word)) continue;
      at_ += word.size();
      return word == "True";
    }
    damaged("True or False");
  }

  std::vector<int64_t> tuple() {
    std::vector<int64_t> values;
    expect('(');
    while (!take(')')) {
      values.push_back(number());
      if (!take(',')) {
        expect(')');
        break;
      }
    }
    return values;
  }

 private:
  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }

  int64_t number() {
    skip_spaces();
    int64_t value = 0;
    const auto [end, code] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    if (code != std::errc{} || value < 0) damaged("a size");
    at_ = size_t(end - text_.data());
    if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // Python 2 wrote its long integers so
    return value;
  }

  std::string_view text_;
  const fs::path& path_;
  size_t at_ = 0;
};

/// "<u2" and its kin.
TokenType parse_type(std::string_view name, const fs::path& path) {
  const auto one_of = [](char ch, std::string_view allowed) { return allowed.find(ch) != std::string_view::npos; };
  const bool known = name.size() == 3 && one_of(name[0], "<>=|") && one_of(name[1], "ui") && one_of(name[2], "1248");
  require(known && (name[0] != '|' || name[2] == '1'), ErrorKind::kData,
          "{}: its element type is '{}', but tokens must be integers ('<u2' or '<i4', say): convert it with "
          "array.astype(numpy.uint16) or numpy.uint32",
          path.string(), name);
  return {.bytes = name[2] - '0', .is_signed = name[1] == 'i', .big_endian = name[0] == '>'};
}

/// The product of the sizes in bytes must be what the file holds behind its header.
void check_size(TokenLayout& layout, const MappedFile& file) {
  layout.tokens = 1;
  int64_t bytes = 0;
  bool overflow = false;
  for (const int64_t size : layout.shape) overflow |= __builtin_mul_overflow(layout.tokens, size, &layout.tokens);
  overflow |= __builtin_mul_overflow(layout.tokens, int64_t(layout.type.bytes), &bytes);
  require(!overflow && bytes == file.size() - layout.offset, ErrorKind::kData,
          "{}: the .npy header promises ({}) elements of {} bytes, but {} bytes follow it: the file is truncated, "
          "damaged or holds several arrays; copy it again or {}",
          file.path().string(), fmt::join(layout.shape, ", "), layout.type.bytes, file.size() - layout.offset, kAdvice);
}

/// The dict between magic and elements; sets layout.offset.
std::string_view header_text(const MappedFile& file, TokenLayout& layout) {
  const std::string_view all = text_of(file.bytes());
  require(all.starts_with(kMagic) && all.size() >= 12, ErrorKind::kData,
          "{}: not a .npy file, or its first bytes are damaged; headerless files need data.format = \"raw_u16\" or "
          "\"raw_u32\"",
          file.path().string());
  const int version = uint8_t(all[6]);
  require(version >= 1 && version <= 3, ErrorKind::kData, "{}: .npy version {} is unknown (1 to 3 are known); {}",
          file.path().string(), version, kAdvice);
  uint32_t length = 0;
  const size_t length_bytes = version == 1 ? 2 : 4;
  std::memcpy(&length, all.data() + 8, length_bytes);
  layout.offset = int64_t(8 + length_bytes + length);
  require(layout.offset <= file.size(), ErrorKind::kData,
          "{}: the .npy header should be {} bytes long, but the file has {}: truncated or damaged; {}",
          file.path().string(), length, file.size(), kAdvice);
  return all.substr(8 + length_bytes, length);
}

}  // namespace

bool looks_like_npy(std::span<const std::byte> bytes) {
  const std::string_view all = text_of(bytes);
  return all.starts_with(kMagic) || all.substr(0, 128).find("'descr'") != std::string_view::npos;
}

TokenLayout read_npy_header(const MappedFile& file) {
  TokenLayout layout{.format = "npy"};
  HeaderReader reader(header_text(file, layout), file.path());
  std::optional<std::string_view> type;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
  reader.expect('{');
  while (!reader.take('}')) {
    const std::string_view key = reader.string();
    reader.expect(':');
    if (key == "descr") type = reader.string();
    else if (key == "fortran_order") fortran_order = reader.boolean();
    else if (key == "shape") shape = reader.tuple();
    else reader.damaged("'descr', 'fortran_order' or 'shape'");
    if (!reader.take(',')) {
      reader.expect('}');
      break;
    }
  }
  if (!type || !fortran_order || !shape) reader.damaged("'descr', 'fortran_order' and 'shape'");
  require(!*fortran_order || shape->size() <= 1, ErrorKind::kData,
          "{}: the array is in Fortran order, so its tokens do not lie in reading order: convert it with "
          "numpy.ascontiguousarray",
          file.path().string());
  layout.type = parse_type(*type, file.path());
  layout.shape = *shape;
  check_size(layout, file);
  return layout;
}

}  // namespace optimus
