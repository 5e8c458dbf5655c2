// Text to token ids and back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace optimus {

/// Receives the ids of a text piece by piece, in order.
using TokenSink = std::function<void(std::span<const int32_t>)>;

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Number of ids, end-of-document included.
  virtual int64_t vocab() const = 0;
  /// The id that ends every document of a token file. encode() never makes it.
  virtual int32_t end_of_document() const = 0;
  /// Encodes a whole document. The tokenizer chooses where it may cut, so a text of any length needs little memory.
  virtual void encode(std::string_view text, const TokenSink& sink) const = 0;
  /// Special tokens decode to nothing, ids outside the vocabulary (a model's vocabulary may be padded) to U+FFFD.
  /// Ids may cut a UTF-8 character: the bytes of consecutive calls concatenate to the text.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;

  std::vector<int32_t> encode(std::string_view text) const;
};

/// 257 tokens: the bytes, and 256 for the end of a document.
class ByteTokenizer final : public Tokenizer {
 public:
  using Tokenizer::encode;

  int64_t vocab() const override { return 257; }
  int32_t end_of_document() const override { return 256; }
  void encode(std::string_view text, const TokenSink& sink) const override;
  std::string decode(std::span<const int32_t> ids) const override;
};

/// The tokenizer named by data.tokenizer or --tokenizer. Error(kUsage) for a name that is not "byte".
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name);

}  // namespace optimus
