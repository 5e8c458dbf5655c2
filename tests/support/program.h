// The program as a real process: started, watched, signalled, its output read.
#pragma once

#include <csignal>
#include <string>
#include <vector>

namespace optimus::test {

struct ProgramResult {
  int code = 0;  ///< exit code, or 128 + signal when a signal ended it
  std::string out, err;
};

struct ProgramLimits {
  int64_t file_bytes = -1;  ///< no file may grow beyond: a full disk
};

/// A running optimus. Destruction kills what still runs.
class Program {
 public:
  Program(const std::string& binary, const std::vector<std::string>& arguments, const ProgramLimits& limits = {});
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void signal(int number) const { kill(pid_, number); }
  bool running();
  ProgramResult wait();

 private:
  void read_output();

  pid_t pid_ = -1;
  int status_ = 0;
  bool ended_ = false;
  int out_ = -1, err_ = -1;
  ProgramResult result_;
};

inline ProgramResult run_program(const std::string& binary, const std::vector<std::string>& arguments,
                                 const ProgramLimits& limits = {}) {
  return Program(binary, arguments, limits).wait();
}

}  // namespace optimus::test
