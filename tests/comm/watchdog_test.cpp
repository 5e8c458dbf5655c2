// The watchdog with real processes: whatever ends one of them, the others leave with exit code 5 and say why, unless it
// was a farewell.
#include "optimus/comm/watchdog.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>

#include <gtest/gtest.h>

#include "support/temporary_folder.h"

namespace optimus::test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kSize = 4;
const Watchdog::Limits kLimits{milliseconds(50), milliseconds(1500), milliseconds(600), milliseconds(1500)};

/// Something that waits since the process began, and may report a failure.
class WaitingGroup final : public Watched {
 public:
  std::optional<Wait> oldest_wait() override { return Wait{"group dp, all_gather of 4096 bytes", since_}; }
  std::string failure() override { return failing ? "the transport of group dp has failed" : ""; }
  std::atomic<bool> failing{false};

 private:
  const Clock::time_point since_ = Clock::now();
};

/// Processes with a ring of watchdogs, ranks 0 .. kSize - 1, and what they print on standard error.
class WatchdogTest : public ::testing::Test {
 protected:
  using Body = std::function<void(int rank, Watchdog& watchdog)>;

  void TearDown() override {
    for (const pid_t process : processes_)
      if (process > 0) {
        kill(process, SIGKILL);
        waitpid(process, nullptr, 0);
      }
  }

  /// Starts the processes; each runs the body and then says farewell and ends with code 0. Returns when all are connected.
  void start(const Body& body, int size = kSize) {
    for (int rank = 0; rank < size; ++rank) {
      const pid_t process = fork();
      ASSERT_GE(process, 0);
      if (process == 0) run(rank, size, body);
      processes_.push_back(process);
    }
    for (int rank = 0; rank < size; ++rank) ASSERT_TRUE(appears(file("connected", rank))) << output(rank);
  }

  /// The exit code of a process: 0 to 255; minus the signal that killed it; -1000 while it still runs after `limit`.
  int exit_code(int rank, milliseconds limit = milliseconds(10'000)) {
    pid_t& process = processes_[size_t(rank)];
    for (const auto until = Clock::now() + limit; Clock::now() < until; std::this_thread::sleep_for(milliseconds(5))) {
      int status = 0;
      if (waitpid(process, &status, WNOHANG) != process) continue;
      process = -1;
      return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }
    return -1000;
  }
  std::string output(int rank) const { return read_text(file("stderr", rank)); }
  pid_t process(int rank) const { return processes_[size_t(rank)]; }
  static void wait_for_ever(int, Watchdog&) { std::this_thread::sleep_for(std::chrono::seconds(60)); }

  void expect_left(int rank, const std::string& reason) {
    EXPECT_EQ(exit_code(rank), 5) << "rank " << rank;
    EXPECT_MENTIONS(output(rank), reason);
    EXPECT_MENTIONS(output(rank), fmt::format("rank {} of {}", rank, processes_.size()));
  }

 private:
  fs::path file(const std::string& name, int rank) const { return folder_.path() / fmt::format("{}.{}", name, rank); }
  static bool appears(const fs::path& path) {
    for (int i = 0; i < 4000 && !fs::exists(path); ++i) std::this_thread::sleep_for(milliseconds(5));
    return fs::exists(path);
  }

  [[noreturn]] void run(int rank, int size, const Body& body) {
    const int out = open(file("stderr", rank).c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    dup2(out, STDERR_FILENO);
    int code = 0;
    try {
      // Texts go by files that appear whole.
      const auto exchange = [&](const std::string& mine) {
        optimus::testing::write_bytes(file("writing", rank), mine);
        fs::rename(file("writing", rank), file("text", rank));
        std::vector<std::string> all;
        for (int other = 0; other < size; ++other) {
          expects(appears(file("text", other)), "rank {} is missing", other);
          all.push_back(read_text(file("text", other)));
        }
        return all;
      };
      Watchdog watchdog(rank, size, exchange, kLimits);
      optimus::testing::write_bytes(file("connected", rank), "");
      body(rank, watchdog);
    } catch (const std::exception& error) {
      fmt::print(stderr, "{}\n", error.what());
      code = 1;
    }
    _exit(code);
  }

  optimus::testing::TemporaryFolder folder_;
  std::vector<pid_t> processes_;
};

TEST_F(WatchdogTest, AKilledProcessEndsAll) {
  start([](int rank, Watchdog& watchdog) {
    WaitingGroup group;
    if (rank == 2) watchdog.add(group);
    std::this_thread::sleep_for(milliseconds(200));
    if (rank == 1) raise(SIGKILL);
    wait_for_ever(rank, watchdog);
  });
  EXPECT_EQ(exit_code(1), -SIGKILL);
  expect_left(0, "rank 1 has failed or was killed");
  expect_left(2, "rank 1 has failed or was killed");
  expect_left(3, "rank 1 has failed or was killed");  // no neighbour: told along the ring
  EXPECT_MENTIONS(output(0), "waited for no transfer");
  EXPECT_MENTIONS(output(2), "waited for group dp, all_gather of 4096 bytes, for ");
}

TEST_F(WatchdogTest, BetweenTwoProcessesThereAreTwoConnections) {
  start(wait_for_ever, 2);
  kill(process(0), SIGKILL);
  EXPECT_EQ(exit_code(0), -SIGKILL);
  expect_left(1, "rank 0 has failed or was killed");
}

TEST_F(WatchdogTest, AStoppedProcessEndsTheOthers) {
  start(wait_for_ever);
  const auto begin = Clock::now();
  kill(process(3), SIGSTOP);
  for (const int rank : {0, 1, 2}) expect_left(rank, "rank 3 has given rank");
  EXPECT_GE(Clock::now() - begin, kLimits.silence - 2 * kLimits.heartbeat);
  kill(process(3), SIGCONT);
  EXPECT_EQ(exit_code(3), 5);
}

// As a suspended job: nobody ran, so nobody was silent.
TEST_F(WatchdogTest, AllMayBeStoppedTogether) {
  start([](int, Watchdog&) { std::this_thread::sleep_for(milliseconds(4000)); });
  for (int rank = 0; rank < kSize; ++rank) kill(process(rank), SIGSTOP);
  std::this_thread::sleep_for(kLimits.silence + milliseconds(500));
  for (int rank = 0; rank < kSize; ++rank) kill(process(rank), SIGCONT);
  for (int rank = 0; rank < kSize; ++rank) EXPECT_EQ(exit_code(rank), 0) << output(rank);
}

TEST_F(WatchdogTest, AFarewellIsNoFailure) {
  start([](int rank, Watchdog&) { std::this_thread::sleep_for(milliseconds(100 + 500 * rank)); });
  for (int rank = 0; rank < kSize; ++rank) {
    EXPECT_EQ(exit_code(rank), 0);
    EXPECT_EQ(output(rank), "");
  }
}

TEST_F(WatchdogTest, AnExceptionSaysNoFarewell) {
  start([](int rank, Watchdog& watchdog) {
    if (rank == 2) throw std::runtime_error("the disk of rank 2");
    wait_for_ever(rank, watchdog);
  });
  EXPECT_EQ(exit_code(2), 1);
  EXPECT_EQ(output(2), "the disk of rank 2\n");
  for (const int rank : {0, 1, 3}) expect_left(rank, "rank 2 has failed or was killed");
}

// A process whose own error is on its way ends by that.
TEST_F(WatchdogTest, LeavesTimeToEndProperly) {
  start([](int rank, Watchdog& watchdog) {
    if (rank == 0) {
      std::this_thread::sleep_for(milliseconds(200));
      raise(SIGKILL);
    }
    if (rank == 2) std::this_thread::sleep_for(milliseconds(450));  // of the 800 until its neighbours leave
    if (rank == 2) throw std::runtime_error("error of rank 2");
    wait_for_ever(rank, watchdog);
  });
  EXPECT_EQ(exit_code(2), 1);
  for (const int rank : {1, 3}) expect_left(rank, "has failed or was killed");
}

TEST_F(WatchdogTest, AFailureOfTheTransportEndsAll) {
  start([](int rank, Watchdog& watchdog) {
    WaitingGroup group;
    group.failing = true;
    if (rank == 1) watchdog.add(group);
    wait_for_ever(rank, watchdog);
  });
  for (int rank = 0; rank < kSize; ++rank) expect_left(rank, "the transport of group dp has failed");
}

TEST_F(WatchdogTest, AWaitThatDoesNotEndEndsAll) {
  start([](int rank, Watchdog& watchdog) {
    WaitingGroup group;
    if (rank == 1) watchdog.add(group);
    wait_for_ever(rank, watchdog);
  });
  for (int rank = 0; rank < kSize; ++rank) expect_left(rank, "group dp, all_gather of 4096 bytes has not finished in");
}

TEST_F(WatchdogTest, WhatIsRemovedIsNotWatched) {
  start([](int, Watchdog& watchdog) {
    {
      WaitingGroup group;
      watchdog.add(group);
      watchdog.remove(group);
    }
    std::this_thread::sleep_for(milliseconds(2200));
  });
  for (int rank = 0; rank < kSize; ++rank) EXPECT_EQ(exit_code(rank), 0) << output(rank);
}

TEST_F(WatchdogTest, AProcessThatFailsMustEnd) {
  start([](int rank, Watchdog& watchdog) {
    if (rank == 3) watchdog.expect_end("rank 3 hangs in its destructors");
    wait_for_ever(rank, watchdog);
  });
  for (int rank = 0; rank < kSize; ++rank) expect_left(rank, "rank 3 hangs in its destructors");
}

TEST(WatchdogRing, NeedsAllRanks) {
  EXPECT_THROW(Watchdog(0, 1, [](const std::string& mine) { return std::vector{mine}; }), std::logic_error);
  EXPECT_THROW(Watchdog(0, 2, [](const std::string& mine) { return std::vector{mine}; }), std::logic_error);
}

}  // namespace
}  // namespace optimus::test
