#include "optimus/checkpoint/run_folder.h"

#include "optimus/base/log.h"

namespace optimus {
namespace {

constexpr std::string_view kStepPrefix = "step-";
constexpr const char* kTuningFile = "tuning.json";

fs::path checkpoints_folder(const fs::path& run_dir) { return run_dir / "checkpoints"; }

/// The number in "step-00001000"; nothing for any other name.
std::optional<int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  const std::string digits = name.substr(kStepPrefix.size());
  if (digits.size() < 8 || digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos)
    return std::nullopt;
  return std::stoll(digits);
}

/// Names in the run's folder of checkpoints; none when it does not exist.
std::vector<std::string> names_in_checkpoints(const fs::path& run_dir) {
  std::vector<std::string> names;
  std::error_code code;
  for (const fs::directory_entry& entry : fs::directory_iterator(checkpoints_folder(run_dir), code))
    names.push_back(entry.path().filename().string());
  require(!code || code == std::errc::no_such_file_or_directory, ErrorKind::kData, "cannot list {}: {}",
          checkpoints_folder(run_dir).string(), code.message());
  return names;
}

/// Opens a folder that passes the check; otherwise warns, naming what is wrong, and returns nothing.
std::optional<Checkpoint> open_checked(const fs::path& folder, Checkpoint::Check check) {
  try {
    Checkpoint checkpoint(folder);
    require(step_of(folder.filename().string()) == checkpoint.step(), ErrorKind::kData,
            "it holds the state after step {}", checkpoint.step());
    const std::vector<Damage> damages = checkpoint.damages(check);
    if (damages.empty()) return checkpoint;
    log().warn("checkpoint {} is damaged and is not used: {}", folder.string(), damage_text(damages));
  } catch (const Error& error) {
    log().warn("checkpoint {} is damaged and is not used: {}", folder.string(), error.what());
  }
  return std::nullopt;
}

void remove_checkpoint(const fs::path& folder) {
  fs::path doomed = folder;
  doomed += ".deleted";
  std::error_code code;
  fs::remove_all(doomed, code);
  fs::rename(folder, doomed, code);
  if (!code) fs::remove_all(doomed, code);
  if (code) log().warn("cannot delete the old checkpoint {}: {}", folder.string(), code.message());
}

}  // namespace

fs::path step_folder(const fs::path& run_dir, int64_t step) {
  return checkpoints_folder(run_dir) / fmt::format("{}{:08d}", kStepPrefix, step);
}

std::vector<fs::path> step_folders(const fs::path& run_dir) {
  std::vector<std::pair<int64_t, std::string>> steps;
  for (const std::string& name : names_in_checkpoints(run_dir))
    if (const std::optional<int64_t> step = step_of(name)) steps.emplace_back(*step, name);
  std::sort(steps.rbegin(), steps.rend());
  std::vector<fs::path> folders;
  for (const auto& [step, name] : steps) folders.push_back(checkpoints_folder(run_dir) / name);
  return folders;
}

std::optional<Checkpoint> newest_valid(const fs::path& run_dir) {
  for (const fs::path& folder : step_folders(run_dir))
    if (std::optional<Checkpoint> checkpoint = open_checked(folder, Checkpoint::Check::kContents)) return checkpoint;
  return std::nullopt;
}

Checkpoint resolve_checkpoint(const fs::path& path) {
  std::error_code ignored;
  if (fs::exists(path / "manifest.json", ignored)) return Checkpoint(path);
  require(fs::is_directory(checkpoints_folder(path), ignored), ErrorKind::kData,
          "{} is no checkpoint: it holds neither a manifest.json nor, as a run.dir would, a folder checkpoints",
          path.string());
  std::optional<Checkpoint> checkpoint = newest_valid(path);
  require(checkpoint.has_value(), ErrorKind::kData, "{} holds no valid checkpoint", checkpoints_folder(path).string());
  return std::move(*checkpoint);
}

VerifyReport verify_checkpoint(const fs::path& path) {
  std::vector<fs::path> folders = {path};
  if (!fs::exists(path / "manifest.json")) folders = step_folders(path);
  require(!folders.empty(), ErrorKind::kData, "{} holds no checkpoint", path.string());
  VerifyReport report;
  for (const fs::path& folder : folders) {
    report.checkpoints.push_back(folder.string());
    try {
      Checkpoint checkpoint(folder);
      report.tensors += int64_t(checkpoint.manifest().tensors.size());
      for (Damage& damage : checkpoint.damages(Checkpoint::Check::kContents))
        report.damages.push_back({(folder / damage.file).string(), damage.tensor, damage.message});
    } catch (const Error& error) {
      report.damages.push_back({(folder / "manifest.json").string(), "", error.what()});
    }
  }
  return report;
}

void prune(const fs::path& run_dir, int64_t keep) {
  expects(keep >= 1, "prune: keep = {}", keep);
  int64_t kept = 0;
  bool proven = false;  // one of the kept ones has every checksum right
  for (const fs::path& folder : step_folders(run_dir)) {
    if (kept >= keep && proven) {
      remove_checkpoint(folder);
    } else if (std::optional<Checkpoint> checkpoint = open_checked(folder, Checkpoint::Check::kStructure)) {
      ++kept;
      proven = proven || checkpoint->damages(Checkpoint::Check::kContents).empty();
    }
  }
}

void remove_leftovers(const fs::path& run_dir) {
  for (const std::string& name : names_in_checkpoints(run_dir)) {
    if (!name.ends_with(".partial") && !name.ends_with(".deleted")) continue;
    std::error_code code;
    fs::remove_all(checkpoints_folder(run_dir) / name, code);
    if (code) log().warn("cannot remove the leftover {}: {}", name, code.message());
  }
}

std::string read_tuning(const fs::path& run_dir) {
  constexpr uintmax_t kLargest = uintmax_t(16) << 20;
  const fs::path file = run_dir / kTuningFile;
  std::error_code code;
  const fs::file_status status = fs::status(file, code);
  if (status.type() == fs::file_type::not_found) return {};
  // A size that cannot be had is the largest number.
  const bool table = fs::is_regular_file(status) && fs::file_size(file, code) <= kLargest;
  require(table, ErrorKind::kData, "{} is no table of choices that `optimus bench ops --tune` wrote{}: remove it",
          file.string(), code ? " (" + code.message() + ")" : "");
  return read_text(file);
}

fs::path write_tuning(const fs::path& run_dir, const std::string& choices) {
  make_folder(run_dir);
  write_text_atomically(run_dir / kTuningFile, choices);
  return run_dir / kTuningFile;
}

std::string damage_text(const std::vector<Damage>& damages) {
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < std::min(kShown, damages.size()); ++i)
    text += fmt::format("{}{}", i ? "; " : "", damages[i].message);
  if (damages.size() > kShown) text += fmt::format("; and {} more", damages.size() - kShown);
  return text;
}

}  // namespace optimus
