// The ring of connections of a Watchdog: one thread's work. Messages on a connection: 'h', a sign of life; 'g', farewell;
// 'f', four bytes of length and a text: the run has failed, pass it on.
#pragma once

#include <array>

#include "optimus/comm/watchdog.h"

namespace optimus {

class WatchdogRing {
 public:
  using Clock = std::chrono::steady_clock;

  /// Connects the ring. Collective.
  WatchdogRing(int rank, int size, const Watchdog::Exchange& exchange, const Watchdog::Limits& limits);
  ~WatchdogRing();
  WatchdogRing(const WatchdogRing&) = delete;
  WatchdogRing& operator=(const WatchdogRing&) = delete;

  /// Watches until stop(). Never returns where the run fails.
  void run();
  /// Ends run(), with a farewell to the neighbours or without. By another thread.
  void stop(bool farewell);

  /// Leaves at that time, unless an earlier one is set. By any thread.
  void leave_at(Clock::time_point time, const std::string& reason);
  /// What this process waits for; for the paragraph that it leaves with. By any thread.
  void set_waits(std::vector<Watched::Wait> waits);

 private:
  /// A connection to a neighbour.
  struct Link {
    int fd = -1;
    int peer = 0;
    Clock::time_point heard{};
    std::string in, out;
  };

  void wait_for_events(int milliseconds);
  void receive(Link& link);
  void take_messages(Link& link);
  void flush(Link& link);
  void beat(Clock::time_point now);
  void check(Clock::time_point now);
  void say_farewell();
  void spread(const std::string& text, const Link* from);
  void lost(Link& link, const char* how);
  [[noreturn]] void leave(Clock::time_point now);

  const int rank_, size_;
  const Watchdog::Limits limits_;
  std::array<Link, 2> links_;  ///< to the next rank and from the one before
  int wake_[2] = {-1, -1};     ///< a pipe that ends a wait
  Clock::time_point next_beat_{}, last_tick_{};
  bool told_ = false;  ///< the neighbours know of the failure

  std::mutex mutex_;  ///< of what follows
  std::optional<Clock::time_point> leave_at_;
  std::string reason_;
  std::vector<Watched::Wait> waits_;
  bool stopping_ = false, farewell_ = false;
};

}  // namespace optimus
