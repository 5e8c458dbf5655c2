#include "optimus/data/tokenizer.h"

#include "optimus/base/error.h"

namespace optimus {
namespace {

constexpr size_t kPieceBytes = 1 << 16;
constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

}  // namespace

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  encode(text, [&](std::span<const int32_t> piece) { ids.insert(ids.end(), piece.begin(), piece.end()); });
  return ids;
}

void ByteTokenizer::encode(std::string_view text, const TokenSink& sink) const {
  std::vector<int32_t> ids;
  for (size_t begin = 0; begin < text.size(); begin += kPieceBytes) {
    ids.clear();
    for (const char byte : text.substr(begin, kPieceBytes)) ids.push_back(uint8_t(byte));
    sink(ids);
  }
}

std::string ByteTokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) {
    if (id >= 0 && id < 256) text.push_back(char(id));
    else if (id != end_of_document()) text.append(kReplacementCharacter);
  }
  return text;
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name) {
  require(name == "byte", ErrorKind::kUsage,
          "unknown tokenizer \"{}\": only \"byte\" is supported, tokenizer.json files are not yet; tokenize with "
          "another program and give its .npy or Megatron .bin/.idx files as data.train",
          name);
  return std::make_unique<ByteTokenizer>();
}

}  // namespace optimus
