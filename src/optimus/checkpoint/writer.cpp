#include "optimus/checkpoint/writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "optimus/checkpoint/checksum.h"
#include "optimus/comm/together.h"

namespace optimus {
namespace {

constexpr int64_t kBufferBytes = 32 << 20;

fs::path without_trailing_slash(const fs::path& folder) {
  const fs::path path = fs::absolute(folder).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

fs::path with_ending(fs::path path, const char* ending) { return path += ending; }

SafetensorsTensor tensor_of(const TensorPart& part) {
  SafetensorsTensor tensor;
  const bool is_whole = part.box.size == part.global;
  tensor.name = is_whole ? part.name : part.name + box_text(part.box);
  tensor.dtype = safetensors_name(part.dtype);
  for (int i = 0; i < part.box.size.rank(); ++i) tensor.shape.push_back(part.box.size[i]);
  return tensor;
}

/// Renames `partial` to `folder`. An older `folder` changes places with it in one step, so that at every moment one of
/// the two is there; file systems that cannot exchange get two renames.
void move_into_place(const fs::path& partial, const fs::path& folder) {
  const fs::path old = with_ending(folder, ".deleted");
  std::error_code ignored;
  if (fs::exists(folder) && renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, folder.c_str(), RENAME_EXCHANGE) == 0) {
    fs::remove_all(partial, ignored);
    return;
  }
  fs::remove_all(old, ignored);
  if (fs::exists(folder) && std::rename(folder.c_str(), old.c_str()) != 0)
    fail(ErrorKind::kData, "cannot rename {} to {}: {}", folder.string(), old.string(), std::strerror(errno));
  if (std::rename(partial.c_str(), folder.c_str()) != 0) {
    const int code = errno;
    if (fs::exists(old, ignored)) fs::rename(old, folder, ignored);  // what was there stays there
    errno = code;
    fail(ErrorKind::kData, "cannot rename {} to {}: {}", partial.string(), folder.string(), std::strerror(errno));
  }
  fs::remove_all(old, ignored);
}

}  // namespace

CheckpointWriter::CheckpointWriter(const fs::path& folder, int64_t step, Processes& processes)
    : processes_(processes), folder_(without_trailing_slash(folder)), partial_(with_ending(folder_, ".partial")) {
  manifest_.step = step;
  manifest_.config = nlohmann::json::object();
  together(processes_, [&] {
    if (processes_.rank() != 0) return;
    std::error_code ignored;
    fs::remove_all(partial_, ignored);
    make_folder(partial_);
  });
}

CheckpointWriter::CheckpointWriter(std::shared_ptr<Processes> alone, const fs::path& folder, int64_t step)
    : CheckpointWriter(folder, step, *alone) {
  alone_ = std::move(alone);
}

CheckpointWriter::CheckpointWriter(const fs::path& folder, int64_t step)
    : CheckpointWriter(make_single_process(), folder, step) {}

CheckpointWriter::~CheckpointWriter() {
  std::error_code ignored;
  if (!committed_ && processes_.rank() == 0) fs::remove_all(partial_, ignored);
}

void CheckpointWriter::write(const std::string& name, const std::vector<TensorPart>& parts, const Fill& fill) {
  if (parts.empty()) return;
  const fs::path path(name);
  const std::string file = processes_.size() == 1 ? name
                                                  : fmt::format("{}-{:05}{}", path.stem().string(), processes_.rank(),
                                                                path.extension().string());
  std::vector<SafetensorsTensor> tensors;
  for (const TensorPart& part : parts) tensors.push_back(tensor_of(part));
  SafetensorsWriter out(partial_ / file, tensors);
  std::vector<std::byte> buffer;
  for (size_t i = 0; i < parts.size(); ++i) {
    const TensorPart& part = parts[i];
    const int64_t elements = part.box.size.elements(), size = size_of(part.dtype);
    Checksum checksum;
    for (int64_t first = 0; first < elements; first += kBufferBytes / size) {
      buffer.resize(size_t(std::min(kBufferBytes / size, elements - first) * size));
      fill(part, first, buffer);
      checksum.add(buffer);
      out.write(buffer);
    }
    TensorRecord& record = manifest_.tensors.try_emplace(part.name).first->second;
    expects(record.slices.empty() || (record.global == part.global && record.dtype == part.dtype),
            "tensor {}: its parts have different shapes or types", part.name);
    record.name = part.name;
    record.dtype = part.dtype;
    record.global = part.global;
    record.slices.push_back({part.box, file, tensors[i].name, checksum.hex()});
  }
  out.close();
}

void CheckpointWriter::add_records(const std::vector<std::string>& texts) {
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const Manifest other = Manifest::parse(texts[rank], fmt::format("the records of rank {}", rank));
    for (const auto& [name, record] : other.tensors) {
      const auto [found, added] = manifest_.tensors.try_emplace(name, record);
      if (!added) found->second.slices.insert(found->second.slices.end(), record.slices.begin(), record.slices.end());
    }
  }
}

void CheckpointWriter::commit(nlohmann::json config, nlohmann::json source) {
  const std::vector<std::string> texts = processes_.gather(processes_.rank() == 0 ? "" : manifest_.text());
  together(processes_, [&] {
    if (processes_.rank() != 0) return;
    add_records(texts);
    manifest_.config = std::move(config);
    manifest_.source = std::move(source);
    OutputFile file(partial_ / "manifest.json");
    file.write(manifest_.text());
    file.close();
    sync_folder(partial_);
    move_into_place(partial_, folder_);
    sync_folder(folder_.parent_path());
  });
  committed_ = true;
}

void copy_file_durably(const fs::path& from, const fs::path& to) {
  const MappedFile source(from);
  OutputFile copy(to);
  copy.write(source.data(), size_t(source.size()));
  copy.close();
}

}  // namespace optimus
