#include "optimus/data/tokenizer.h"

#include "data/fixtures.h"

namespace optimus {
namespace {

TEST(Tokenizer, BytesThereAndBack) {
  const auto tokenizer = make_tokenizer("byte");
  EXPECT_EQ(tokenizer->vocab(), 257);
  EXPECT_EQ(tokenizer->end_of_document(), 256);
  std::string text;
  for (int i = 0; i < 300000; ++i) text.push_back(char(i * 7 + i / 256));
  const std::vector<int32_t> ids = tokenizer->encode(text);
  ASSERT_EQ(ids.size(), text.size()) << "several pieces";
  EXPECT_EQ(ids[1], 7);
  EXPECT_EQ(ids[255], (255 * 7) % 256);
  EXPECT_EQ(tokenizer->decode(ids), text);
  EXPECT_TRUE(tokenizer->encode("").empty());
}

TEST(Tokenizer, DecodesSpecialAndUnknownIds) {
  const ByteTokenizer tokenizer;
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{'a', 256, 'b', 300, -1}), "ab\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST(Tokenizer, OthersAreRefused) {
  expect_error(ErrorKind::kUsage, {"tokenizer.json", "byte"}, [] { make_tokenizer("model/tokenizer.json"); });
}

}  // namespace
}  // namespace optimus
