#include "optimus/plan/hardware.h"

#include <cmath>
#include <cstdlib>
#include <set>

#include <fmt/ranges.h>

#include "optimus/base/fields.h"
#include "optimus/base/file.h"

namespace optimus {
namespace {

constexpr auto kUsage = ErrorKind::kUsage;

// What can be added and divided a few times without leaving the range of int64_t or double.
constexpr double kSmallest = 1e-15, kLargest = 1e18;

/// Visits the rates after reading.
struct RateCheck {
  const std::string& file;
  void operator()(std::string_view key, const std::string& value) const {
    require(!value.empty(), kUsage, "{}: {} is missing", file, key);
  }
  void table(std::string_view key, const Rate& rate) const {
    require(rate.value > 0, kUsage, "{}: {} needs a value above zero: {} = {{ value = ..., source = \"...\" }}", file,
            key, key);
    require(rate.value >= kSmallest && rate.value <= kLargest, kUsage,
            "{}: {} = {} is no number of any machine; units are SI: bytes, seconds, FLOP/s, bytes/s", file, key,
            rate.value);
    require(!rate.source.empty(), kUsage, "{}: {} does not say where it comes from; give {}.source", file, key, key);
  }
};

std::vector<fs::path> folders() {
  std::vector<fs::path> folders;
  if (const char* own = std::getenv("OPTIMUS_HARDWARE")) folders.emplace_back(own);
  folders.emplace_back("hardware");
  std::error_code unknown;
  const fs::path program = fs::read_symlink("/proc/self/exe", unknown);
  if (!unknown) folders.push_back((program.parent_path() / "../../hardware").lexically_normal());
  return folders;
}

}  // namespace

Hardware parse_hardware(const std::string& text, const std::string& file) {
  toml::table table;
  try {
    table = toml::parse(text, file);
  } catch (const toml::parse_error& error) {
    fail(kUsage, "{}: line {}, column {}: {}", file, error.source().begin.line, error.source().begin.column,
         error.description());
  }
  Hardware hardware;
  FieldReader reader(table, file, "");
  hardware.fields(reader);
  reader.finish();
  RateCheck check{file};
  hardware.fields(check);
  const double ranks = hardware.devices_per_node.value;
  require(ranks >= 1 && ranks <= 1e6 && ranks == std::floor(ranks), kUsage,
          "{}: devices_per_node = {} must be a whole number from 1 to a million", file, ranks);
  return hardware;
}

Hardware load_hardware(const std::string& name) {
  std::error_code absent;
  if (fs::path(name).extension() == ".toml") {
    require(fs::is_regular_file(name, absent), kUsage, "--hardware {}: there is no such file", name);
    return parse_hardware(read_text(name), name);
  }
  std::set<std::string> known;
  for (const fs::path& folder : folders()) {
    const fs::path file = folder / (name + ".toml");
    if (fs::is_regular_file(file, absent)) return parse_hardware(read_text(file), file.string());
    for (const auto& entry : fs::directory_iterator(folder, absent))
      if (entry.path().extension() == ".toml") known.insert(entry.path().stem());
  }
  std::vector<std::string> places;
  for (const fs::path& folder : folders()) places.push_back(folder.string());
  fail(kUsage,
       "--hardware {}: no {}.toml in {}; {}. A path ending in .toml or the variable OPTIMUS_HARDWARE (a folder) names "
       "others",
       name, name, fmt::join(places, ", "),
       known.empty() ? "no description is there" : fmt::format("known are {}", fmt::join(known, ", ")));
}

}  // namespace optimus
