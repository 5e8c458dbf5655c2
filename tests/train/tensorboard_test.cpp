#include "optimus/train/tensorboard.h"

#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstring>
#include <set>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace optimus {
namespace {

/// One field of a protobuf message: number, and the bytes (lengths and fixed widths) or the value (varints).
struct Field {
  uint64_t number = 0;
  uint64_t varint = 0;
  std::string bytes;

  double as_double() const { return read_as<double>(); }
  float as_float() const { return read_as<float>(); }

 private:
  template <typename T>
  T read_as() const {
    T value{};
    EXPECT_EQ(bytes.size(), sizeof(T));
    std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof(T)));
    return value;
  }
};

/// An independent reader of the wire format.
std::vector<Field> parse_message(std::string_view text) {
  size_t at = 0;
  auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = uint8_t(text.at(at++));
      value |= uint64_t(byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
  };
  std::vector<Field> fields;
  while (at < text.size()) {
    const uint64_t tag = varint();
    Field field{.number = tag >> 3, .varint = 0, .bytes = {}};
    switch (tag & 7) {
      case 0: field.varint = varint(); break;
      case 1: field.bytes = text.substr(at, 8), at += 8; break;
      case 2: {
        const uint64_t length = varint();
        field.bytes = text.substr(at, length), at += length;
        break;
      }
      case 5: field.bytes = text.substr(at, 4), at += 4; break;
      default: ADD_FAILURE() << "wire type " << (tag & 7); return fields;
    }
    fields.push_back(field);
  }
  EXPECT_EQ(at, text.size());
  return fields;
}

/// The payloads of an event file, every checksum checked (unmasked the way readers do).
std::vector<std::string> payloads_of(const fs::path& path) {
  const std::string text = read_text(path);
  auto word = [&](size_t at) {
    uint32_t value = 0;
    std::memcpy(&value, text.data() + at, sizeof(value));
    return value;
  };
  auto unmask = [](uint32_t masked) { return std::rotl(masked - 0xa282ead8u, 15); };
  std::vector<std::string> payloads;
  size_t at = 0;
  while (at < text.size()) {
    EXPECT_LE(at + 16, text.size());
    uint64_t length = 0;
    std::memcpy(&length, text.data() + at, sizeof(length));
    EXPECT_EQ(unmask(word(at + 8)), crc32c(std::string_view(text).substr(at, 8)));
    payloads.push_back(text.substr(at + 12, length));
    EXPECT_EQ(unmask(word(at + 12 + length)), crc32c(payloads.back()));
    at += 16 + length;
  }
  EXPECT_EQ(at, text.size());
  return payloads;
}

class TensorBoard : public testing::Test {
 protected:
  TensorBoard() : folder_(fs::temp_directory_path() / fmt::format("optimus-tensorboard-{}", getpid())) {
    fs::remove_all(folder_);
    make_folder(folder_);
  }
  ~TensorBoard() override { fs::remove_all(folder_); }

  fs::path folder_;
};

TEST(Crc32c, KnownVectors) {  // the check value of the CRC catalogue, and RFC 3720 B.4
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
  std::string rising;
  for (int i = 0; i < 32; ++i) rising.push_back(char(i));
  EXPECT_EQ(crc32c(rising), 0x46DD794Eu);
}

TEST_F(TensorBoard, EventsParseBack) {
  struct Point {
    int64_t step;
    std::string tag;
    double value;
  };
  const std::vector<Point> points{{1, "train/loss", 2.5},
                                  {128, "x", 0.0},                     // the first number of two varint bytes
                                  {300, std::string(200, 't'), -0.1},  // lengths past one varint byte
                                  {int64_t(1) << 40, "router/layer 3/entropy", 1e30}};
  const double before = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  TensorBoardWriter writer(folder_);
  for (const Point& point : points) writer.add(point.step, point.tag, point.value);
  writer.flush();

  const auto payloads = payloads_of(writer.path());
  ASSERT_EQ(payloads.size(), 2 + points.size());
  for (size_t i = 0; i < points.size(); ++i) {
    const auto event = parse_message(payloads[2 + i]);
    ASSERT_EQ(event.size(), 3u);
    EXPECT_EQ(event[0].number, 1u);
    EXPECT_GE(event[0].as_double(), before);
    EXPECT_LE(event[0].as_double(), before + 60.0);
    EXPECT_EQ(event[1].number, 2u);
    EXPECT_EQ(int64_t(event[1].varint), points[i].step);
    EXPECT_EQ(event[2].number, 5u);
    const auto summary = parse_message(event[2].bytes);
    ASSERT_EQ(summary.size(), 1u);
    EXPECT_EQ(summary[0].number, 1u);
    const auto value = parse_message(summary[0].bytes);
    ASSERT_EQ(value.size(), 2u);
    EXPECT_EQ(value[0].number, 1u);
    EXPECT_EQ(value[0].bytes, points[i].tag);
    EXPECT_EQ(value[1].number, 2u);
    EXPECT_EQ(value[1].as_float(), float(points[i].value));
  }
}

TEST_F(TensorBoard, AFileOpensWithItsVersionAndTheSessionsFirstStep) {
  const TensorBoardWriter writer(folder_, 700);
  const auto payloads = payloads_of(writer.path());  // already in the file: nothing was flushed here
  ASSERT_EQ(payloads.size(), 2u);

  const auto version = parse_message(payloads[0]);
  EXPECT_EQ(version.back().number, 3u);
  EXPECT_EQ(version.back().bytes, "brain.Event:2");

  const auto session = parse_message(payloads[1]);
  EXPECT_EQ(session[1].varint, 701u);
  EXPECT_EQ(session.back().number, 7u);
  EXPECT_EQ(session.back().bytes, std::string("\x08\x01"));  // status = START
}

TEST_F(TensorBoard, EveryWriterHasItsOwnFileInOrder) {
  std::vector<std::string> names;
  for (int i = 0; i < 3; ++i) {
    TensorBoardWriter writer(folder_, i);
    writer.add(i, "x", 1.0);
    writer.flush();
    names.push_back(writer.path().filename());
    EXPECT_NE(names.back().find("tfevents"), std::string::npos);  // what TensorBoard looks for
  }
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()).size(), 3u);
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
}

}  // namespace
}  // namespace optimus
