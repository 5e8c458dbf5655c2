#include "optimus/checkpoint/safetensors.h"

#include <cstring>

#include "support/temporary_folder.h"

namespace optimus {
namespace {

using testing::error_of;
using testing::mutated;
using testing::random_floats;
using testing::TemporaryFolder;
using testing::write_bytes;

SafetensorsTensor tensor(const std::string& name, const std::string& dtype, std::vector<int64_t> shape) {
  SafetensorsTensor made;
  made.name = name;
  made.dtype = dtype;
  made.shape = std::move(shape);
  return made;
}

/// A file by hand: any header text, any data.
void write_file(const fs::path& path, const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string bytes(reinterpret_cast<const char*>(&length), 8);
  write_bytes(path, bytes + header + data);
}

std::string refusal(const std::string& header, const std::string& data) {
  TemporaryFolder folder;
  const fs::path path = folder.path() / "x.safetensors";
  write_file(path, header, data);
  const std::string message = error_of(ErrorKind::kData, [&] { SafetensorsReader reader(path); });
  EXPECT_MENTIONS(message, path.string());
  return message;
}

TEST(Safetensors, RoundTripInPieces) {
  TemporaryFolder folder;
  const fs::path path = folder.path() / "x.safetensors";
  const std::vector<float> values = random_floats(6, 1);
  const auto bytes = std::as_bytes(std::span(values));
  const std::byte one{7};
  SafetensorsWriter writer(path, {tensor("b", "F32", {2, 3}), tensor("e", "F32", {0, 4}), tensor("a", "U8", {})});
  writer.write(bytes.first(5));
  writer.write(bytes.subspan(5));
  writer.write({&one, 1});
  writer.close();

  const SafetensorsReader reader(path);
  ASSERT_EQ(reader.tensors().size(), 3u);
  EXPECT_EQ(reader.tensors()[0].offset % 8, 0);
  ASSERT_TRUE(reader.find("b"));
  EXPECT_EQ(reader.find("b")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(std::memcmp(reader.bytes(*reader.find("b")).data(), values.data(), 24), 0);
  EXPECT_EQ(reader.bytes(*reader.find("a"))[0], one);
  EXPECT_EQ(reader.find("e")->bytes, 0);
  EXPECT_EQ(reader.find("c"), nullptr);
}

TEST(Safetensors, SameListSameBytes) {
  TemporaryFolder folder;
  for (const char* name : {"1", "2"}) {
    SafetensorsWriter writer(folder.path() / name, {tensor("x\"\n", "I64", {1}), tensor("y", "BF16", {3})});
    writer.write(std::as_bytes(std::span("0123456789abcd", 14)));
    writer.close();
  }
  EXPECT_EQ(read_text(folder.path() / "1"), read_text(folder.path() / "2"));
}

TEST(Safetensors, RefusesWhatDoesNotFit) {
  EXPECT_MENTIONS(refusal(R"({"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "1234"), "tensor t");
  EXPECT_MENTIONS(refusal(R"({"t":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", "12345678"), "expected 12");
  EXPECT_MENTIONS(refusal(R"({"t":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})", "12345678"), "F99");
  EXPECT_MENTIONS(refusal(R"({"t":{"dtype":"U8","shape":[-1],"data_offsets":[0,8]}})", "12345678"), "shape");
  EXPECT_MENTIONS(refusal(R"({"t":{"dtype":"U8","shape":[1e2],"data_offsets":[0,8]}})", "12345678"), "shape");
  EXPECT_MENTIONS(refusal(R"({"t":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", ""),
                  "too large");
  EXPECT_MENTIONS(refusal(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}})", "1234"), "data_offsets");
  EXPECT_MENTIONS(refusal(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                          R"("u":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                          "123456"),
                  "overlaps");
  EXPECT_MENTIONS(refusal(R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})", "1234"), "gap");
  EXPECT_MENTIONS(refusal(R"({"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "1234"), "follow");
  EXPECT_MENTIONS(refusal(std::string(100000, '['), ""), "nested");
  EXPECT_MENTIONS(refusal("[]", ""), "expected an object");
}

TEST(Safetensors, RefusesHeaderLengthBeyondTheFile) {
  TemporaryFolder folder;
  const fs::path path = folder.path() / "x.safetensors";
  write_bytes(path, std::string(8, '\xff') + "{}");
  EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { SafetensorsReader reader(path); }), "header claims");
  write_bytes(path, "123");
  EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { SafetensorsReader reader(path); }), "too few");
}

TEST(Safetensors, MutationsEndInAnErrorOrAValidFile) {
  TemporaryFolder folder;
  const fs::path path = folder.path() / "x.safetensors";
  SafetensorsWriter writer(path, {tensor("first", "F32", {2, 3}), tensor("second", "BF16", {4})});
  writer.write(std::as_bytes(std::span("0123456789abcdefghijklmnopqrstuv", 32)));
  writer.close();
  const std::string original = read_text(path);
  std::mt19937 generator(7);
  int refused = 0;
  constexpr int kMutations = 1500;
  for (int i = 0; i < kMutations; ++i) {
    write_bytes(path, mutated(original, generator));
    try {
      const SafetensorsReader reader(path);
      for (const SafetensorsTensor& one : reader.tensors()) {
        const std::span<const std::byte> bytes = reader.bytes(one);
        ASSERT_LE(one.offset + one.bytes, fs::file_size(path));
        volatile std::byte sum{};  // the bytes must be there to be read
        for (const std::byte byte : bytes) sum = sum ^ byte;
      }
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kData);
      ++refused;
    }
  }
  EXPECT_GT(refused, kMutations / 2);
}

}  // namespace
}  // namespace optimus
