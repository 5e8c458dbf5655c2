// The one exception of the project. Library code throws it, never prints and never exits; main() prints its text
// and leaves with its kind's exit code.
#pragma once

#include <stdexcept>
#include <string>

#include <fmt/format.h>

namespace optimus {

/// What went wrong, by who can mend it. The values are the program's exit codes.
enum class ErrorKind : int {
  kUsage = 2,          ///< command line or configuration
  kData = 3,           ///< token files, checkpoints, file system
  kNumerical = 4,      ///< a loss or gradient that is not finite
  kCommunication = 5,  ///< a peer, a collective, or a device that failed
  kMemory = 6,         ///< the plan does not fit the device, or memory was refused
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <typename... Args>
[[noreturn]] void fail(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(kind, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
void require(bool condition, ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) fail(kind, format, std::forward<Args>(args)...);
}

/// A broken contract between two parts of the program: a bug, not bad input.
template <typename... Args>
void expects(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) throw std::logic_error(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace optimus
