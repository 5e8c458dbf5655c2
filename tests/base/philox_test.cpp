// Philox4x32-10 against the published known answers (kat_vectors of Random123), and the keys of seeds and purposes.
#include "optimus/base/philox.h"

#include <set>

#include <gtest/gtest.h>

namespace optimus::test {
namespace {

std::array<uint32_t, 4> words_of(Philox generator, const std::array<uint32_t, 4>& counter) {
  std::array<uint32_t, 4> out;
  generator(counter[0] | uint64_t(counter[1]) << 32, counter[2] | uint64_t(counter[3]) << 32, out.data());
  return out;
}

TEST(Philox, KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(words_of({0, 0}, {0, 0, 0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words_of({0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words_of({0xa4093822, 0x299f31d0}, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, SeedsAndPurposesGetTheirOwnKeys) {
  std::set<uint64_t> keys;
  for (uint64_t seed = 0; seed < 100; ++seed)
    for (const char* purpose : {"init", "shuffle", "dropout"}) {
      const Philox generator = philox_for(seed, purpose);
      keys.insert(uint64_t(generator.key1) << 32 | generator.key0);
    }
  EXPECT_EQ(keys.size(), 300u);
}

TEST(Philox, UniformStaysInsideTheOpenInterval) {
  EXPECT_GT(to_uniform(0), 0.0f);
  EXPECT_LT(to_uniform(0xffffffffu), 1.0f);
  EXPECT_FLOAT_EQ(to_uniform(0x80000000u), 0.5f);
}

}  // namespace
}  // namespace optimus::test
