// Options that several commands share.
#pragma once

#include <CLI/CLI.hpp>

namespace optimus {

inline void add_device_option(CLI::App& command, std::string& device) {
  command.add_option("--device", device, "Where to compute; auto: a GPU where there is one, else the CPU")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
}

}  // namespace optimus
