#include "optimus/data/token_file.h"

#include <numeric>
#include <random>

#include <nlohmann/json.hpp>

#include "data/fixtures.h"
#include "optimus/data/megatron.h"

namespace optimus {
namespace {

std::vector<int32_t> all_ids(const TokenFile& file) {
  std::vector<int32_t> ids(size_t(file.size()));
  file.read(0, file.size(), ids.data());
  return ids;
}

/// 0, 1, 2, ... of any type.
template <typename T>
std::vector<T> counting(int64_t size) {
  std::vector<T> values(static_cast<size_t>(size));
  std::iota(values.begin(), values.end(), T(0));
  return values;
}

void write_pair(const std::string& prefix, int64_t vocab, const std::vector<std::vector<int32_t>>& documents) {
  MegatronWriter writer(prefix, vocab);
  for (const auto& document : documents) {
    writer.append(document);
    writer.end_document();
  }
  writer.finish();
}

template <typename T>
void expect_npy_reads(const std::string& type, bool swapped) {
  const TemporaryFolder folder;
  std::vector<T> values = counting<T>(120);
  if constexpr (sizeof(T) == 2) values.back() = 31000;
  if constexpr (sizeof(T) >= 4) values.back() = 2147483647;
  const std::vector<int32_t> expected(values.begin(), values.end());
  for (int version = 1; version <= 3; ++version) {
    for (const std::string shape : {"(120,)", "(6, 20)", "(2, 3, 4, 5)"}) {
      write_bytes(folder / "x.npy", npy_bytes(type, shape, bytes_of(values, swapped), version));
      const TokenFile file(folder / "x.npy");
      EXPECT_EQ(file.format_name(), "npy");
      EXPECT_EQ(all_ids(file), expected) << type << " version " << version << " shape " << shape;
      EXPECT_EQ(fmt::format("({})", fmt::join(file.shape(), ", ")), shape == "(120,)" ? "(120)" : shape);
    }
  }
}

TEST(TokenFile, ReadsEveryIntegerTypeOfNpy) {
  expect_npy_reads<uint8_t>("|u1", false);
  expect_npy_reads<int8_t>("|i1", false);
  expect_npy_reads<uint16_t>("<u2", false);
  expect_npy_reads<int16_t>("<i2", false);
  expect_npy_reads<uint32_t>("<u4", false);
  expect_npy_reads<int32_t>("<i4", false);
  expect_npy_reads<uint64_t>("<u8", false);
  expect_npy_reads<int64_t>("<i8", false);
  expect_npy_reads<uint16_t>(">u2", true);
  expect_npy_reads<int16_t>(">i2", true);
  expect_npy_reads<uint32_t>(">u4", true);
  expect_npy_reads<int32_t>(">i4", true);
  expect_npy_reads<uint64_t>(">u8", true);
  expect_npy_reads<int64_t>(">i8", true);
}

TEST(TokenFile, NpyThatHoldsNoTokensInOrderIsRefused) {
  const TemporaryFolder folder;
  const std::string elements = bytes_of(counting<uint16_t>(6));
  const auto refused = [&](const std::string& bytes, const std::string& fragment) {
    write_bytes(folder / "x.npy", bytes);
    expect_error(ErrorKind::kData, {folder / "x.npy", fragment}, [&] { TokenFile(folder / "x.npy"); });
  };
  refused(npy_bytes("<f4", "(3,)", elements), "'<f4'");
  refused(npy_bytes("|b1", "(12,)", elements), "'|b1'");
  refused(npy_bytes("<u2", "(2, 3)", elements, 1, "True"), "ascontiguousarray");
  refused(npy_bytes("<u2", "(7,)", elements), "truncated");
  refused(npy_bytes("<u2", "(5,)", elements), "several arrays");
  refused(npy_bytes("<u2", "(0, 3)", ""), "no tokens");
  refused(npy_bytes("<u2", "(4294967296, 4294967296, 6)", elements), "4294967296");
  refused(npy_bytes("<u2", "(-6,)", elements), "a size");
  refused(npy_bytes("<u2", "(6,)", elements).substr(0, 40), "header");
  refused("\x92" + npy_bytes("<u2", "(6,)", elements).substr(1), "first bytes are damaged");
  refused("", "empty");

  write_bytes(folder / "x.npy", npy_bytes("<u2", "(6,)", elements, 1, "True"));
  EXPECT_EQ(all_ids(TokenFile(folder / "x.npy")), counting<int32_t>(6)) << "one dimension has only one order";
}

TEST(TokenFile, ReadsHeaderlessFiles) {
  const TemporaryFolder folder;
  const std::vector<uint16_t> narrow{1, 2, 65535, 4, 5};
  const std::vector<uint32_t> wide{1, 100000, 3};
  for (const std::string name : {"a.npy", "b.bin", "c.u16", "d.raw"}) {
    write_bytes(folder / name, bytes_of(narrow));
    const TokenFile file(folder / name);
    EXPECT_EQ(file.format_name(), "raw_u16");
    EXPECT_EQ(all_ids(file), (std::vector<int32_t>{1, 2, 65535, 4, 5}));
    EXPECT_EQ(TokenFile(folder / name.substr(0, 1)).path(), folder / name);
    EXPECT_EQ(TokenFile(folder / name.substr(0, 1), "raw_u16").size(), 5);
  }
  write_bytes(folder / "e.u32", bytes_of(wide));
  EXPECT_EQ(all_ids(TokenFile(folder / "e")), (std::vector<int32_t>{1, 100000, 3}));
  write_bytes(folder / "part-1.npy", bytes_of(wide));
  EXPECT_EQ(all_ids(TokenFile(folder / "part-1", "raw_u32")), (std::vector<int32_t>{1, 100000, 3}));
}

TEST(TokenFile, ReadsPartsAcrossTheFile) {
  const TemporaryFolder folder;
  write_bytes(folder / "x.u16", bytes_of(counting<uint16_t>(1000)));
  const TokenFile file(folder / "x.u16");
  std::vector<int32_t> ids(3);
  file.read(997, 3, ids.data());
  EXPECT_EQ(ids, (std::vector<int32_t>{997, 998, 999}));
  EXPECT_THROW(file.read(998, 3, ids.data()), std::logic_error);
}

TEST(TokenFile, AFileCutWhileInUseIsAnError) {
  const TemporaryFolder folder;
  const std::string path = folder / "cut.u16";
  write_bytes(path, std::string(100000, '\0'));
  const TokenFile file(path);
  std::vector<int32_t> ids(10);
  file.read(40000, 10, ids.data());
  write_bytes(path, std::string(10, '\0'));
  EXPECT_THROW(file.read(40000, 10, ids.data()), Error);
}

TEST(TokenFile, MegatronRoundTrip) {
  const TemporaryFolder folder;
  for (const int64_t vocab : {65536, 65537}) {
    const int32_t last = int32_t(vocab) - 1;
    write_pair(folder / "pair", vocab, {{1, 2, 3}, {last}, {}, {4, 5}});
    for (const std::string name : {"pair", "pair.bin", "pair.idx"}) {
      for (const std::string format : {"auto", "megatron"}) {
        const TokenFile file(folder / name, format);
        EXPECT_EQ(file.format_name(), "megatron");
        EXPECT_EQ(file.dtype_name(), vocab == 65536 ? "uint16" : "int32");
        EXPECT_EQ(all_ids(file), (std::vector<int32_t>{1, 2, 3, last, 4, 5}));
        EXPECT_EQ(file.documents(), 4);
      }
    }
  }
  EXPECT_FALSE(fs::exists(folder / "pair.bin.partial"));
  EXPECT_FALSE(fs::exists(folder / "pair.idx.partial"));
}

/// An index of one document, for any type code.
std::string index_bytes(uint8_t code, int32_t tokens) {
  return std::string("MMIDIDX\0\0", 9) + bytes_of<uint64_t>({1}) + std::string(1, char(code)) +
         bytes_of<uint64_t>({1, 2}) + bytes_of<int32_t>({tokens}) + bytes_of<int64_t>({0, 0, 1});
}

TEST(TokenFile, ReadsEveryMegatronTypeCode) {
  const TemporaryFolder folder;
  const auto reads = [&](uint8_t code, const std::string& elements, const std::string& type) {
    write_bytes(folder / "x.bin", elements);
    write_bytes(folder / "x.idx", index_bytes(code, 100));
    const TokenFile file(folder / "x");
    EXPECT_EQ(file.dtype_name(), type);
    EXPECT_EQ(all_ids(file), counting<int32_t>(100));
  };
  reads(1, bytes_of(counting<uint8_t>(100)), "uint8");
  reads(2, bytes_of(counting<int8_t>(100)), "int8");
  reads(3, bytes_of(counting<int16_t>(100)), "int16");
  reads(4, bytes_of(counting<int32_t>(100)), "int32");
  reads(5, bytes_of(counting<int64_t>(100)), "int64");
  reads(8, bytes_of(counting<uint16_t>(100)), "uint16");
  for (const uint8_t code : {0, 6, 7, 9}) {
    write_bytes(folder / "x.idx", index_bytes(code, 100));
    expect_error(ErrorKind::kData, {"x.idx", "element type"}, [&] { TokenFile(folder / "x"); });
  }
}

TEST(TokenFile, PairsThatDoNotAgreeAreRefused) {
  const TemporaryFolder folder;
  write_pair(folder / "x", 257, {{1, 2, 3}, {4, 5}});
  write_bytes(folder / "x.bin", bytes_of<uint16_t>({1, 2, 3, 4}));
  expect_error(ErrorKind::kData, {"x.idx", "x.bin has 8 bytes"}, [&] { TokenFile(folder / "x"); });
  write_bytes(folder / "x.bin", bytes_of<uint16_t>({1, 2, 3, 4, 5, 6}));
  expect_error(ErrorKind::kData, {"take 10 bytes", "x.bin has 12"}, [&] { TokenFile(folder / "x"); });

  write_pair(folder / "x", 257, {{1, 2, 3}, {4, 5}});
  std::string index = read_text(folder / "x.idx");
  index.replace(34 + 2 * 4 + 8, 8, bytes_of<int64_t>({0}));  // the second sequence starts where the first does
  write_bytes(folder / "x.idx", index);
  expect_error(ErrorKind::kData, {"sequence 1 ", "at byte 0", "ends at byte 6"}, [&] { TokenFile(folder / "x"); });

  fs::remove(folder / "x.bin");
  expect_error(ErrorKind::kData, {"cannot find", "x.bin"}, [&] { TokenFile(folder / "x"); });
  expect_error(ErrorKind::kData, {"cannot find", "y.bin"}, [&] { TokenFile(folder / "y", "megatron"); });
}

TEST(TokenFile, WriterThatDoesNotFinishLeavesNothing) {
  const TemporaryFolder folder;
  write_pair(folder / "x", 257, {{1, 2, 3}});
  {
    MegatronWriter writer(folder / "x", 257);
    writer.append(std::vector<int32_t>{7, 8});
    EXPECT_THROW(writer.append(std::vector<int32_t>{257}), std::logic_error);
  }
  EXPECT_EQ(all_ids(TokenFile(folder / "x")), (std::vector<int32_t>{1, 2, 3})) << "the old pair stays";
  EXPECT_FALSE(fs::exists(folder / "x.bin.partial"));
  expect_error(ErrorKind::kData, {"no documents", "y.bin"}, [&] { MegatronWriter(folder / "y", 257).finish(); });
}

TEST(TokenFile, AmbiguousMissingAndUnknownPaths) {
  const TemporaryFolder folder;
  write_pair(folder / "x", 257, {{1}});
  write_bytes(folder / "x.npy", npy_bytes("<u2", "(1,)", "ab"));
  expect_error(ErrorKind::kData, {"x.idx", "x.npy", "with its ending"}, [&] { TokenFile(folder / "x"); });
  expect_error(ErrorKind::kData, {"cannot find", folder / "missing"}, [&] { TokenFile(folder / "missing"); });
  write_bytes(folder / "text.txt", "some text");
  expect_error(ErrorKind::kData, {"text.txt", "optimus tokenize"}, [&] { TokenFile(folder / "text.txt"); });
  write_bytes(folder / "odd.u16", "abc");
  expect_error(ErrorKind::kData, {"odd.u16", "3 bytes"}, [&] { TokenFile(folder / "odd.u16"); });
  expect_error(ErrorKind::kData, {"x.npy", "\"auto\""}, [&] { TokenFile(folder / "x.npy", "raw_u16"); });
  expect_error(ErrorKind::kData, {"odd.u16", "raw_u16"}, [&] { TokenFile(folder / "odd.u16", "npy"); });
  expect_error(ErrorKind::kUsage, {"\"csv\""}, [&] { TokenFile(folder / "x", "csv"); });
}

TEST(TokenFile, IdsOutsideTheVocabularyNameFileByteAndId) {
  const TemporaryFolder folder;
  std::vector<int32_t> ids(3);
  write_bytes(folder / "raw.u16", bytes_of<uint16_t>({1, 2, 3, 300, 4, 5}));
  const TokenFile raw(folder / "raw.u16", "auto", 257);
  raw.read(0, 3, ids.data());
  expect_error(ErrorKind::kData, {folder / "raw.u16", "token 300 at byte 6 ", "vocabulary of 257"},
               [&] { raw.read(2, 3, ids.data()); });
  EXPECT_NO_THROW(TokenFile(folder / "raw.u16", "auto", 301).read(2, 3, ids.data()));

  write_bytes(folder / "signed.npy", npy_bytes(">i4", "(3,)", bytes_of<int32_t>({1, -2, 3}, true)));
  expect_error(ErrorKind::kData, {"token -2 at byte 132 "},
               [&] { TokenFile(folder / "signed.npy").read(0, 3, ids.data()); });
  write_bytes(folder / "wide.npy", npy_bytes("<u8", "(2,)", bytes_of<uint64_t>({1, 0xFFFFFFFFFFFFFFFF})));
  expect_error(ErrorKind::kData, {"token 18446744073709551615 at byte 136 "},
               [&] { TokenFile(folder / "wide.npy").read(0, 2, ids.data()); });
}

/// Damages a file in many ways; reading it must end with ids or with Error(kData), never otherwise.
class Damage {
 public:
  explicit Damage(uint64_t seed) : random_(seed) {}

  std::string operator()(std::string bytes) {
    switch (random_() % 4) {
      case 0: bytes[random_() % bytes.size()] ^= char(1 << random_() % 8); break;
      case 1: bytes[random_() % bytes.size()] = char(random_()); break;
      case 2: bytes.resize(random_() % bytes.size()); break;
      default: {
        const std::string part = bytes.substr(random_() % bytes.size(), random_() % 16);
        bytes.insert(random_() % bytes.size(), part);
      }
    }
    return bytes;
  }

 private:
  std::mt19937_64 random_;
};

/// Whether the file could be read; any exception but Error(kData) escapes and fails the test.
bool survives(const std::string& path, const std::string& format) {
  try {
    const TokenFile file(path, format, 257);
    EXPECT_GT(file.size(), 0);
    EXPECT_LT(file.size(), 1000);
    all_ids(file);
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(int(error.kind()), int(ErrorKind::kData)) << error.what();
    EXPECT_NE(std::string(error.what()).find(fs::path(path).parent_path().string()), std::string::npos) << error.what();
    return false;
  }
}

TEST(TokenFile, DamagedNpyIsRefusedOrReads) {
  const TemporaryFolder folder;
  const std::string whole = npy_bytes("<u2", "(10, 12)", bytes_of(counting<uint16_t>(120)));
  Damage damage(1);
  int refused = 0;
  for (int i = 0; i < 1000; ++i) {
    write_bytes(folder / "x.npy", damage(whole));
    refused += !survives(folder / "x.npy", i % 2 ? "npy" : "auto");
  }
  EXPECT_GT(refused, 300);
  EXPECT_LT(refused, 1000) << "a flipped id inside the vocabulary cannot be seen";
}

TEST(TokenFile, DamagedIndexIsRefusedOrReads) {
  const TemporaryFolder folder;
  write_pair(folder / "x", 257, {{1, 2, 3}, {4, 5}, {6}, {7, 8, 9, 10}});
  const std::string whole = read_text(folder / "x.idx");
  const std::vector<int32_t> ids = all_ids(TokenFile(folder / "x"));
  Damage damage(2);
  int refused = 0;
  for (int i = 0; i < 1000; ++i) {
    write_bytes(folder / "x.idx", damage(whole));
    if (!survives(folder / "x", "megatron")) {
      ++refused;
    } else if (read_text(folder / "x.idx")[17] == whole[17]) {  // the type code: int16 reads these ids as uint16 does
      EXPECT_EQ(all_ids(TokenFile(folder / "x")), ids);
    }
  }
  EXPECT_GT(refused, 800);
}

TEST(TokenFile, DamagedCountsOfAnIndexCannotOverflow) {
  const TemporaryFolder folder;
  write_pair(folder / "x", 257, {{1, 2, 3}, {4, 5}});
  const std::string whole = read_text(folder / "x.idx");
  for (const size_t at : {18, 26}) {
    for (const uint64_t count : {uint64_t(0), uint64_t(1) << 32, uint64_t(1) << 61, uint64_t(1) << 63, ~uint64_t(0),
                                 uint64_t(0x1555555555555556)}) {
      std::string damaged = whole;
      damaged.replace(at, 8, bytes_of<uint64_t>({count}));
      write_bytes(folder / "x.idx", damaged);
      EXPECT_FALSE(survives(folder / "x", "megatron")) << count;
    }
  }
}

TEST(TokenFile, DescribesItself) {
  const TemporaryFolder folder;
  write_pair(folder / "x", 257, {{1, 2, 256}, {4, 5}});
  EXPECT_EQ(describe_token_file(folder / "x").dump(),
            R"({"kind":"tokens","path":")" + folder / "x.bin" +
                R"(","format":"megatron","dtype":"uint16","shape":[5],"tokens":5,"documents":2,"max_id":256,)" +
                R"("first_ids":[1,2,256,4,5]})");
}

}  // namespace
}  // namespace optimus
