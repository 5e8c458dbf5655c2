#include "optimus/base/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "optimus/base/error.h"

namespace optimus {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

[[noreturn]] void fail_system(const char* what, const fs::path& path, int code) {
  fail(ErrorKind::kData, "cannot {} {}: {}{}", what, path.string(), std::strerror(code),
       code == ENOSPC ? " (free some space and start again)" : "");
}

int open_or_fail(const fs::path& path, int flags, const char* what) {
  const int descriptor = open(path.c_str(), flags | O_CLOEXEC, 0666);
  if (descriptor < 0) fail_system(what, path, errno);
  return descriptor;
}

}  // namespace

MappedFile::MappedFile(const fs::path& path) : path_(path) {
  const int descriptor = open_or_fail(path, O_RDONLY | O_NONBLOCK, "open");
  struct stat info {};
  const bool known = fstat(descriptor, &info) == 0;
  const int stat_code = errno;
  if (!known || !S_ISREG(info.st_mode)) {
    close(descriptor);
    fail_system("read", path, known ? (S_ISDIR(info.st_mode) ? EISDIR : EINVAL) : stat_code);
  }
  size_ = info.st_size;
  void* data = size_ ? mmap(nullptr, size_t(size_), PROT_READ, MAP_PRIVATE, descriptor, 0) : nullptr;
  const int map_code = errno;
  close(descriptor);
  if (data == MAP_FAILED) fail_system("map", path, map_code);
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<std::byte*>(data_), size_t(size_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

OutputFile::OutputFile(const fs::path& path, bool append) : path_(path) {
  descriptor_ = open_or_fail(path, O_WRONLY | O_CREAT | (append ? 0 : O_TRUNC), "create");
  if (append) size_ = lseek(descriptor_, 0, SEEK_END);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::write_all(const void* data, size_t bytes, int64_t offset) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = pwrite(descriptor_, next, bytes, offset);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail_system("write", path_, written < 0 ? errno : ENOSPC);
    next += written, bytes -= size_t(written), offset += written;
  }
}

void OutputFile::write(const void* data, size_t bytes) {
  size_ += int64_t(bytes);
  if (buffer_.size() + bytes < kBufferBytes) {
    buffer_.append(static_cast<const char*>(data), bytes);
    return;
  }
  const int64_t start = size_ - int64_t(bytes) - int64_t(buffer_.size());
  write_all(buffer_.data(), buffer_.size(), start);
  write_all(data, bytes, start + int64_t(buffer_.size()));
  buffer_.clear();
}

void OutputFile::write_at(int64_t offset, const void* data, size_t bytes) {
  flush();
  write_all(data, bytes, offset);
}

void OutputFile::flush() {
  write_all(buffer_.data(), buffer_.size(), size_ - int64_t(buffer_.size()));
  buffer_.clear();
}

void OutputFile::close() {
  flush();
  if (fsync(descriptor_) != 0 && errno != EINVAL) fail_system("flush", path_, errno);
  const int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0) fail_system("close", path_, errno);
}

std::string read_text(const fs::path& path) {
  const MappedFile file(path);
  return std::string(reinterpret_cast<const char*>(file.data()), size_t(file.size()));
}

void write_text_atomically(const fs::path& path, std::string_view text) {
  fs::path partial = path;
  partial += ".partial";
  OutputFile file(partial);
  file.write(text);
  file.close();
  if (std::rename(partial.c_str(), path.c_str()) != 0) fail_system("replace", path, errno);
  sync_folder(path.has_parent_path() ? path.parent_path() : fs::path("."));
}

void sync_folder(const fs::path& folder) {
  const int descriptor = open_or_fail(folder, O_RDONLY | O_DIRECTORY, "open");
  const bool done = fsync(descriptor) == 0 || errno == EINVAL;
  const int code = errno;
  close(descriptor);
  if (!done) fail_system("flush", folder, code);
}

void make_folder(const fs::path& folder) {
  std::error_code code;
  fs::create_directories(folder, code);
  if (code) fail_system("create", folder, code.value());
}

FileLock::FileLock(const fs::path& path, std::string_view what) {
  descriptor_ = open_or_fail(path, O_RDWR | O_CREAT, "create");
  if (flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return;
  const int code = errno;
  close(std::exchange(descriptor_, -1));
  if (code == EWOULDBLOCK) fail(ErrorKind::kData, "{} is in use by another process (lock {})", what, path.string());
  fail_system("lock", path, code);
}

FileLock::~FileLock() {
  if (descriptor_ >= 0) close(descriptor_);
}

}  // namespace optimus
