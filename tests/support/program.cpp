#include "support/program.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <stdexcept>

namespace optimus::test {

Program::Program(const std::string& binary, const std::vector<std::string>& arguments, const ProgramLimits& limits) {
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) throw std::runtime_error("pipe failed");
  std::vector<char*> argv{const_cast<char*>(binary.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ == 0) {
    dup2(out[1], STDOUT_FILENO);
    dup2(err[1], STDERR_FILENO);
    if (limits.file_bytes >= 0) {
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{rlim_t(limits.file_bytes), rlim_t(limits.file_bytes)};
      setrlimit(RLIMIT_FSIZE, &limit);
    }
    execv(binary.c_str(), argv.data());
    _exit(127);
  }
  close(out[1]);
  close(err[1]);
  out_ = out[0], err_ = err[0];
}

Program::~Program() {
  if (!ended_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, &status_, 0);
  }
  close(out_);
  close(err_);
}

bool Program::running() {
  if (!ended_ && waitpid(pid_, &status_, WNOHANG) == pid_) ended_ = true;
  return !ended_;
}

// Both pipes at once: a child that fills the one while the other is read would wait forever.
void Program::read_output() {
  pollfd pipes[] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
  std::string* texts[] = {&result_.out, &result_.err};
  for (int open = 2; open > 0;) {
    if (poll(pipes, 2, -1) <= 0) return;
    for (int i : {0, 1}) {
      if (pipes[i].fd < 0 || !pipes[i].revents) continue;
      char buffer[4096];
      const ssize_t count = read(pipes[i].fd, buffer, sizeof buffer);
      if (count > 0) texts[i]->append(buffer, size_t(count));
      else pipes[i].fd = -1, --open;
    }
  }
}

ProgramResult Program::wait() {
  read_output();
  if (!ended_) waitpid(pid_, &status_, 0);
  ended_ = true;
  result_.code = WIFSIGNALED(status_) ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_);
  return result_;
}

}  // namespace optimus::test
