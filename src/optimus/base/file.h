// Files: mapped reading, atomic replacement, durable writing, and the lock of a run's folder. All errors are
// Error(kData) naming the path and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace optimus {

namespace fs = std::filesystem;

/// A whole file mapped read-only. Empty files are allowed and have no bytes.
class MappedFile {
 public:
  explicit MappedFile(const fs::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  std::span<const std::byte> bytes() const { return {data_, size_t(size_)}; }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
  const std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

/// A file being written in order; close() flushes it to the disk (fsync) and reports what went wrong. A file that is
/// destroyed before close() is left as it is, for the caller's clean-up.
class OutputFile {
 public:
  explicit OutputFile(const fs::path& path, bool append = false);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Overwrites bytes already written.
  void write_at(int64_t offset, const void* data, size_t bytes);
  int64_t size() const { return size_; }
  /// Hands buffered bytes to the system without waiting for the disk.
  void flush();
  void close();

 private:
  void write_all(const void* data, size_t bytes, int64_t offset);

  fs::path path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
  std::string buffer_;
};

std::string read_text(const fs::path& path);
/// Writes a neighbour, flushes it and renames it over `path`: readers see the old text or the new, never a part.
void write_text_atomically(const fs::path& path, std::string_view text);
/// Makes a rename or a new entry in `folder` durable.
void sync_folder(const fs::path& folder);
void make_folder(const fs::path& folder);

/// An exclusive lock on a file, held until destruction or the process's death. Throws when another process has it.
class FileLock {
 public:
  /// `what` completes the message: "run.dir runs/x is in use by another process".
  FileLock(const fs::path& path, std::string_view what);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace optimus
