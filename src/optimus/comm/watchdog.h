// Ends this process soon after another process of the run has failed, whatever the transport between them does then: a
// collective on GPUs whose peer is gone waits forever, and so may every call that would clean up after it.
//
// The processes form a ring of TCP connections, rank r to rank r + 1 and back to 0. A process that ends or is killed
// closes its connections; one whose machine is gone, or that was stopped (SIGSTOP, a debugger), stays silent. Either way
// its two neighbours notice, tell the others along the ring, and all print one paragraph on standard error that says what
// they waited for, and leave with exit code 5:
//   - a connection that breaks without a farewell: after `grace`, in which the process's own error may end it properly;
//   - silence: after `silence`, since a heartbeat is due every `heartbeat`. A process that is stopped for longer ends the
//     run. Where all are stopped together (a suspended job) nobody counts the time;
//   - a failure that a watched object reports (an error of NCCL): after `grace`;
//   - a transfer that has not finished `stall` after this process was ready for it: the peer lives, but does not come.
// A process says farewell when its watchdog is destroyed in good order; its neighbours then stop watching it.
//
// Two threads: one for the ring, which never calls a transport, and one that asks the watched objects, which may hang.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace optimus {

/// Something that waits for peers: a communicator.
class Watched {
 public:
  using Clock = std::chrono::steady_clock;
  struct Wait {
    std::string what;  ///< group, operation, bytes
    Clock::time_point since;
  };

  virtual ~Watched() = default;
  // Called by a thread of the watchdog.
  /// What it has waited for the longest, while this process could do no more for it.
  virtual std::optional<Wait> oldest_wait() = 0;
  /// A failure that its transport has noticed; empty without one.
  virtual std::string failure() = 0;
};

class WatchdogRing;

class Watchdog {
 public:
  using Milliseconds = std::chrono::milliseconds;
  /// With these a failed peer ends the run within 30 s.
  struct Limits {
    Milliseconds heartbeat{2'000};
    Milliseconds silence{25'000};
    Milliseconds grace{5'000};
    Milliseconds stall{600'000};
  };
  /// Gives all processes' texts, in rank order, to all of them.
  using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

  /// Of rank `rank` among `size` > 1 processes. Collective over them; Error(kCommunication) where the ring does not close.
  Watchdog(int rank, int size, const Exchange& exchange, Limits limits);
  Watchdog(int rank, int size, const Exchange& exchange) : Watchdog(rank, size, exchange, Limits()) {}
  /// Says farewell, unless an exception passes.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// `watched` stays until it is removed. Its methods do not run any more when remove() returns.
  void add(Watched& watched);
  void remove(Watched& watched);
  /// This process is failing and about to end: leaves with exit code 5 if it still is here after `silence`.
  void expect_end(const std::string& reason);

 private:
  void inspect();

  const Limits limits_;
  const int exceptions_;
  std::unique_ptr<WatchdogRing> ring_;
  std::mutex mutex_;  ///< of what follows
  std::vector<Watched*> watched_;
  bool stopping_ = false;
  std::condition_variable stop_;
  std::thread ring_thread_, inspector_;
};

}  // namespace optimus
