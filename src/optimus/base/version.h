// The program's version, as `--version` and files' headers show it.
#pragma once

namespace optimus {

constexpr const char* kVersion = "0.1.0";

}  // namespace optimus
