// A checkpoint being written. Everything goes into FOLDER.partial and is flushed to the disk; then the manifest is
// written, and a rename makes the folder FOLDER. Until that rename nothing that existed has changed, so a full disk or a
// kill costs the new checkpoint only.
//
// Several processes write one checkpoint together: each its own files, of what it owns; the first makes the folder, puts
// all records into one manifest and renames. Constructor and commit() are collective; an error of one process in between
// must be made known to the others (see comm/together.h).
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "optimus/checkpoint/checkpoint.h"
#include "optimus/comm/processes.h"

namespace optimus {

class CheckpointWriter {
 public:
  /// Creates FOLDER.partial, emptied of what a killed save left.
  CheckpointWriter(const fs::path& folder, int64_t step, Processes& processes);
  CheckpointWriter(const fs::path& folder, int64_t step);  ///< of one process
  /// Removes what was not committed.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Puts elements [first, first + out.size()/size) of the part (row-major, of part.dtype) into `out`.
  using Fill = std::function<void(const TensorPart& part, int64_t first, std::span<std::byte> out)>;
  /// Writes a safetensors file of the parts, in order, through a host buffer of bounded size. Parts of one tensor must
  /// not overlap; those of all files of all processes together make it whole. "m.safetensors" of process 3 of many is
  /// "m-00003.safetensors". No file is made of no parts.
  void write(const std::string& file, const std::vector<TensorPart>& parts, const Fill& fill);

  /// For further files, to be written and flushed by the caller before commit().
  const fs::path& partial_folder() const { return partial_; }

  /// Makes the checkpoint valid, in place of an older one of the same name. `config`: the run's sections by name. Both
  /// count on the first process only.
  void commit(nlohmann::json config, nlohmann::json source = nullptr);

 private:
  CheckpointWriter(std::shared_ptr<Processes> alone, const fs::path& folder, int64_t step);
  /// Into the manifest: those of the other processes.
  void add_records(const std::vector<std::string>& texts);

  std::shared_ptr<Processes> alone_;  ///< where no processes were given
  Processes& processes_;
  fs::path folder_, partial_;
  Manifest manifest_;
  bool committed_ = false;
};

/// Copies a file and flushes it to the disk.
void copy_file_durably(const fs::path& from, const fs::path& to);

}  // namespace optimus
