// Tensors through checkpoints: whatever the boxes they were written in, any box comes back bit for bit, and nothing
// damaged or missing is ever used.
#include <sys/resource.h>

#include <csignal>
#include <cstring>

#include <nlohmann/json.hpp>

#include "optimus/checkpoint/checksum.h"
#include "optimus/checkpoint/run_folder.h"
#include "optimus/checkpoint/writer.h"
#include "support/temporary_folder.h"

namespace optimus {
namespace {

using testing::error_of;
using testing::flip_byte;
using testing::mutated;
using testing::random_floats;
using testing::TemporaryFolder;
using testing::write_bytes;

const Shape kShape{4, 6, 5};

int64_t index_in(const Shape& shape, const Shape& at) {
  int64_t index = 0;
  for (int i = 0; i < shape.rank(); ++i) index = index * shape[i] + at[i];
  return index;
}

/// The box of a whole [4,6,5] tensor, element by element.
std::vector<float> cut(const std::vector<float>& global, const Box& box) {
  std::vector<float> values;
  for (int64_t i = 0; i < box.size[0]; ++i)
    for (int64_t j = 0; j < box.size[1]; ++j)
      for (int64_t k = 0; k < box.size[2]; ++k)
        values.push_back(global[size_t(index_in(kShape, {box.begin[0] + i, box.begin[1] + j, box.begin[2] + k}))]);
  return values;
}

CheckpointWriter::Fill fill_with(const std::vector<float>& global) {
  return [&](const TensorPart& part, int64_t first, std::span<std::byte> out) {
    const std::vector<float> values = cut(global, part.box);
    ASSERT_LE(size_t(first) * 4 + out.size(), values.size() * 4);
    std::memcpy(out.data(), values.data() + first, out.size());
  };
}

std::vector<float> read(Checkpoint& checkpoint, const Box& box) {
  std::vector<float> values(size_t(box.size.elements()));
  checkpoint.read({"layers.0.x", DType::f32, kShape, box}, std::as_writable_bytes(std::span(values)));
  return values;
}

/// A checkpoint of one tensor, in two files.
void save(const fs::path& folder, int64_t step, const std::vector<float>& global) {
  CheckpointWriter writer(folder, step);
  writer.write("weights.safetensors", {{"layers.0.x", DType::f32, kShape, {{0, 0, 0}, {2, 6, 5}}}}, fill_with(global));
  writer.write("more.safetensors", {{"layers.0.x", DType::f32, kShape, {{2, 0, 0}, {2, 6, 5}}}}, fill_with(global));
  writer.commit({{"model", nlohmann::json::object()}});
}

class CheckpointTest : public ::testing::Test {
 protected:
  fs::path step(int64_t number) const { return step_folder(run_.path(), number); }
  void save_step(int64_t number) { save(step(number), number, values_); }
  int64_t newest() const {
    const std::optional<Checkpoint> checkpoint = newest_valid(run_.path());
    return checkpoint ? checkpoint->step() : -1;
  }

  TemporaryFolder run_;
  const std::vector<float> values_ = random_floats(kShape.elements(), 3);
};

TEST_F(CheckpointTest, AnyBoxComesBackFromOddCuts) {
  const fs::path folder = run_.path() / "odd";
  // The first dimension is cut at 1, the second at 2 in one half and 5 in the other, the last at 3.
  std::vector<TensorPart> parts;
  for (const Box& box : {Box{{0, 0, 0}, {1, 2, 5}}, Box{{0, 2, 0}, {1, 4, 3}}, Box{{0, 2, 3}, {1, 4, 2}},
                         Box{{1, 0, 0}, {3, 5, 5}}, Box{{1, 5, 0}, {3, 1, 5}}})
    parts.push_back({"layers.0.x", DType::f32, kShape, box});
  CheckpointWriter writer(folder, 5);
  writer.write("a.safetensors", {parts[4], parts[0], parts[2]}, fill_with(values_));
  writer.write("b.safetensors", {parts[3], parts[1]}, fill_with(values_));
  writer.commit({{"model", nlohmann::json::object()}});

  Checkpoint checkpoint(folder);
  EXPECT_EQ(checkpoint.step(), 5);
  EXPECT_TRUE(checkpoint.damages(Checkpoint::Check::kContents).empty());
  std::mt19937 generator(11);
  for (int round = 0; round < 300; ++round) {
    Box box{{0, 0, 0}, {0, 0, 0}};
    for (int i = 0; i < 3; ++i) {
      box.begin[i] = int64_t(generator() % uint64_t(kShape[i]));
      box.size[i] = 1 + int64_t(generator() % uint64_t(kShape[i] - box.begin[i]));
    }
    EXPECT_EQ(read(checkpoint, box), cut(values_, box)) << box_text(box);
  }
}

TEST_F(CheckpointTest, LoadsInPartsOfATable) {
  ParameterTable table;
  Parameter row;
  row.name = "layers.0.first";
  row.global = {3};
  table.add(row);
  row.name = "layers.0.x";
  row.global = kShape;
  row.boxes = {{{1, 0, 0}, {1, 6, 5}}, {{3, 0, 0}, {1, 6, 5}}};
  table.add(row);
  table.lay_out(1, 1);
  save_step(1);
  Checkpoint checkpoint(step(1));
  std::vector<float> flat(size_t(table.elements()));
  std::vector<TensorPart> parts = parts_of(table, "", DType::f32, 0, table.elements(), 0);
  ASSERT_EQ(parts.size(), 3u);
  parts.erase(parts.begin());
  checkpoint.load(parts, [&](const TensorPart& part, int64_t first, std::span<const std::byte> bytes) {
    std::memcpy(flat.data() + part.offset + first, bytes.data(), bytes.size());
  });
  EXPECT_EQ(std::vector<float>(flat.begin() + table[1].offset, flat.begin() + table[1].offset + 30),
            cut(values_, row.boxes[0]));
  EXPECT_EQ(std::vector<float>(flat.begin() + table[1].offset + 30, flat.begin() + table[1].offset + 60),
            cut(values_, row.boxes[1]));
}

TEST_F(CheckpointTest, ConvertsBetweenF32AndBf16Moments) {
  CheckpointWriter writer(step(1), 1);
  writer.write("optimizer.safetensors", {{"m.x", DType::bf16, {3}, {{0}, {3}}}},
               [](const TensorPart&, int64_t, std::span<std::byte> out) {
                 const bf16 values[] = {bf16(1.0f), bf16(-2.5f), bf16(0.0f)};
                 std::memcpy(out.data(), values, out.size());
               });
  writer.commit({{"model", nlohmann::json::object()}});
  Checkpoint checkpoint(step(1));
  std::vector<float> values(3);
  checkpoint.read({"m.x", DType::f32, {3}, {{0}, {3}}}, std::as_writable_bytes(std::span(values)));
  EXPECT_EQ(values, (std::vector<float>{1.0f, -2.5f, 0.0f}));
  std::vector<int32_t> wrong(3);
  EXPECT_MENTIONS(
      error_of(ErrorKind::kData,
               [&] {
                 checkpoint.read({"m.x", DType::i32, {3}, {{0}, {3}}}, std::as_writable_bytes(std::span(wrong)));
               }),
      "m.x");
}

TEST_F(CheckpointTest, MissingElementIsAnErrorByName) {
  CheckpointWriter writer(step(1), 1);
  writer.write("weights.safetensors", {{"layers.0.x", DType::f32, kShape, {{0, 0, 0}, {4, 6, 4}}}}, fill_with(values_));
  writer.commit({{"model", nlohmann::json::object()}});
  Checkpoint checkpoint(step(1));
  EXPECT_EQ(read(checkpoint, {{0, 0, 0}, {4, 6, 4}}).size(), 96u);
  EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { read(checkpoint, whole(kShape)); }), "layers.0.x");
  EXPECT_EQ(checkpoint.damages(Checkpoint::Check::kStructure).size(), 1u);
  EXPECT_EQ(newest(), -1);
}

TEST_F(CheckpointTest, WrongShapeAndUnknownTensorAreErrorsByName) {
  save_step(1);
  Checkpoint checkpoint(step(1));
  std::vector<std::byte> out(480);
  EXPECT_MENTIONS(error_of(ErrorKind::kData,
                           [&] {
                             checkpoint.read({"layers.0.x", DType::f32, {6, 4, 5}, whole({6, 4, 5})}, out);
                           }),
                  "[4,6,5]");
  EXPECT_MENTIONS(error_of(ErrorKind::kData,
                           [&] {
                             checkpoint.read({"layers.1.x", DType::f32, kShape, whole(kShape)}, out);
                           }),
                  "layers.1.x");
}

TEST_F(CheckpointTest, FlippedByteIsFoundOnLoadAndSteppedOver) {
  save_step(1);
  save_step(2);
  flip_byte(step(2) / "more.safetensors", -1);
  Checkpoint damaged(step(2));
  EXPECT_EQ(read(damaged, {{0, 0, 0}, {2, 6, 5}}), cut(values_, {{0, 0, 0}, {2, 6, 5}}));  // the other slice is right
  const std::string message = error_of(ErrorKind::kData, [&] { read(damaged, whole(kShape)); });
  EXPECT_MENTIONS(message, "more.safetensors");
  EXPECT_MENTIONS(message, "layers.0.x");
  EXPECT_EQ(newest(), 1);
  EXPECT_EQ(resolve_checkpoint(run_.path()).step(), 1);
}

TEST_F(CheckpointTest, TruncatedRemovedAndSwappedShardsAreSteppedOver) {
  for (int64_t number = 1; number <= 4; ++number) save_step(number);
  fs::resize_file(step(4) / "weights.safetensors", fs::file_size(step(4) / "weights.safetensors") - 4);
  fs::remove(step(3) / "more.safetensors");
  fs::copy_file(step(2) / "weights.safetensors", step(2) / "more.safetensors", fs::copy_options::overwrite_existing);
  EXPECT_EQ(newest(), 1);
  const VerifyReport report = verify_checkpoint(run_.path());
  EXPECT_EQ(report.checkpoints.size(), 4u);
  ASSERT_EQ(report.damages.size(), 3u);
  EXPECT_EQ(report.damages[0].file, (step(4) / "weights.safetensors").string());
  EXPECT_EQ(report.damages[0].tensor, "layers.0.x");
  EXPECT_EQ(report.damages[1].file, (step(3) / "more.safetensors").string());
  EXPECT_EQ(report.damages[2].file, (step(2) / "more.safetensors").string());
}

TEST_F(CheckpointTest, NewerFormatAndEditedManifestAreRefused) {
  save_step(1);
  save_step(2);
  const fs::path path = step(2) / "manifest.json";
  nlohmann::json manifest = nlohmann::json::parse(read_text(path));
  manifest["step"] = 7;
  write_bytes(path, manifest.dump());
  EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { Checkpoint checkpoint(step(2)); }), "checksum");
  manifest["format_version"] = 2;
  write_bytes(path, manifest.dump());
  EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { Checkpoint checkpoint(step(2)); }), "format version 2 is newer");
  EXPECT_EQ(newest(), 1);
  EXPECT_EQ(verify_checkpoint(run_.path()).damages.size(), 1u);
}

TEST_F(CheckpointTest, WhatAKillLeavesNeverCounts) {
  save_step(1);
  fs::copy(step(1), run_.path() / "checkpoints" / "step-00000002.partial");
  fs::copy(step(1), run_.path() / "checkpoints" / "step-00000003.deleted");
  fs::create_directory(step(4));  // a name without a manifest
  EXPECT_EQ(newest(), 1);
  remove_leftovers(run_.path());
  EXPECT_EQ(std::distance(fs::directory_iterator(run_.path() / "checkpoints"), {}), 2);
  EXPECT_EQ(newest(), 1);
}

TEST_F(CheckpointTest, AnAbandonedSaveLeavesNothing) {
  save_step(1);
  EXPECT_THROW(
      {
        CheckpointWriter writer(step(2), 2);
        writer.write("weights.safetensors", {{"layers.0.x", DType::f32, kShape, whole(kShape)}},
                     [](const TensorPart&, int64_t, std::span<std::byte>) { throw std::runtime_error("device lost"); });
      },
      std::runtime_error);
  EXPECT_EQ(std::distance(fs::directory_iterator(run_.path() / "checkpoints"), {}), 1);
  EXPECT_EQ(newest(), 1);
}

TEST_F(CheckpointTest, SavingAStepAgainReplacesIt) {
  save_step(1);
  flip_byte(step(1) / "more.safetensors", -1);
  EXPECT_EQ(newest(), -1);
  save_step(1);
  EXPECT_EQ(newest(), 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(run_.path() / "checkpoints"), {}), 1);
}

/// A full disk as the process sees it: no file may grow past `bytes`.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limited{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limited);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST_F(CheckpointTest, AFullDiskCostsOnlyTheNewCheckpoint) {
  save_step(1);
  std::string message;
  {
    FileSizeLimit limit(256);
    message = error_of(ErrorKind::kData, [&] { save_step(2); });
  }
  EXPECT_MENTIONS(message, "step-00000002");
  EXPECT_EQ(newest(), 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(run_.path() / "checkpoints"), {}), 1);
}

TEST_F(CheckpointTest, PruneKeepsTheNewestValidOnes) {
  for (int64_t number = 1; number <= 5; ++number) save_step(number);
  flip_byte(step(5) / "more.safetensors", -1);  // complete to the eye, wrong inside
  fs::remove(step(4) / "weights.safetensors");
  prune(run_.path(), 1);
  EXPECT_EQ(newest(), 3);
  EXPECT_FALSE(fs::exists(step(2)));
  EXPECT_FALSE(fs::exists(step(1)));
  save_step(6);
  prune(run_.path(), 2);
  EXPECT_EQ(step_folders(run_.path()).size(), 2u);  // 6 and 5: the newest is proven, so 5 need only be complete
  EXPECT_EQ(newest(), 6);
}

TEST_F(CheckpointTest, ResolvesFoldersAndRuns) {
  EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { resolve_checkpoint(run_.path() / "nowhere"); }), "nowhere");
  save_step(3);
  EXPECT_EQ(resolve_checkpoint(step(3)).step(), 3);
  EXPECT_EQ(resolve_checkpoint(run_.path()).folder(), step(3));
  flip_byte(step(3) / "weights.safetensors", -1);
  EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { resolve_checkpoint(run_.path()); }), "no valid checkpoint");
}

TEST_F(CheckpointTest, ManifestMutationsEndInAnErrorOrTheSameData) {
  save_step(1);
  const fs::path path = step(1) / "manifest.json";
  const std::string original = read_text(path);
  // Half of the mutants get a right checksum, so that the checks behind it are reached too.
  const auto with_checksum = [&](const std::string& text) {
    try {
      nlohmann::json root = nlohmann::json::parse(text);
      root.erase("checksum");
      const std::string body = root.dump();
      root["checksum"] = checksum_of(std::as_bytes(std::span(body.data(), body.size())));
      return root.dump();
    } catch (const std::exception&) {
      return text;
    }
  };
  std::mt19937 generator(5);
  int refused = 0;
  constexpr int kMutations = 2000;
  for (int i = 0; i < kMutations; ++i) {
    write_bytes(path, original);
    const std::string text = mutated(original, generator);
    write_bytes(path, i % 2 ? with_checksum(text) : text);
    try {
      Checkpoint checkpoint(step(1));
      if (!checkpoint.damages(Checkpoint::Check::kContents).empty()) {
        ++refused;
      } else if (checkpoint.has("layers.0.x")) {
        EXPECT_EQ(read(checkpoint, whole(kShape)), values_);
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
