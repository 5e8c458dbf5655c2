// What a run's folder holds. Its checkpoints, RUN/checkpoints/step-00001000 and so on: which is the newest one that can
// be trusted, and which may go. And RUN/tuning.json.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "optimus/checkpoint/checkpoint.h"

namespace optimus {

/// RUN/checkpoints/step-00001000, the state after `step` updates.
fs::path step_folder(const fs::path& run_dir, int64_t step);

/// The step folders of a run, valid or not, newest first.
std::vector<fs::path> step_folders(const fs::path& run_dir);

/// The newest checkpoint whose every byte is right; newer ones that are not are stepped over with a warning that names
/// the file and the tensor. Nothing when there is none. Reads the whole checkpoint.
std::optional<Checkpoint> newest_valid(const fs::path& run_dir);

/// A CHECKPOINT argument: a checkpoint's own folder (its contents are checked as they are read), or a run.dir, whose
/// newest valid step is meant. Error(kData) for anything else.
Checkpoint resolve_checkpoint(const fs::path& path);

struct VerifyReport {
  std::vector<std::string> checkpoints;  ///< the folders that were read
  int64_t tensors = 0;
  std::vector<Damage> damages;  ///< their files are full paths
};

/// Reads every byte of a checkpoint, or of all checkpoints of a run.dir. An unreadable manifest is a damage too.
VerifyReport verify_checkpoint(const fs::path& path);

/// Deletes the older checkpoints so that `keep` (at least 1) complete ones stay, one of them with every checksum right.
/// A folder is renamed to *.deleted first: a deletion cut short never looks like a checkpoint.
void prune(const fs::path& run_dir, int64_t keep);

/// Removes what killed saves and deletions left (*.partial, *.deleted). Only for the process that holds the run's lock.
void remove_leftovers(const fs::path& run_dir);

/// The choices of algorithms that `optimus bench ops --tune` left in a run's folder (see Ops::choices()); "" where it did not.
/// Error(kData) for what cannot be one.
std::string read_tuning(const fs::path& run_dir);
/// Returns the file.
fs::path write_tuning(const fs::path& run_dir, const std::string& choices);

/// The messages of the first few damages, each naming its file and tensor, and a count of the rest.
std::string damage_text(const std::vector<Damage>& damages);

}  // namespace optimus
