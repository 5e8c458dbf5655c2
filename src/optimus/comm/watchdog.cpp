#include "optimus/comm/watchdog.h"

#include <algorithm>
#include <csignal>
#include <exception>
#include <sstream>

#include "optimus/base/error.h"
#include "optimus/comm/processes.h"
#include "optimus/comm/watchdog_ring.h"

namespace optimus {
namespace {

/// Signals are the main thread's.
template <typename Work>
std::thread quiet_thread(Work&& work) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::forward<Work>(work));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace

Watchdog::Watchdog(int rank, int size, const Exchange& exchange, Limits limits)
    : limits_(limits),
      exceptions_(std::uncaught_exceptions()),
      ring_(std::make_unique<WatchdogRing>(rank, size, exchange, limits)) {
  ring_thread_ = quiet_thread([this] { ring_->run(); });
  inspector_ = quiet_thread([this] { inspect(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  inspector_.join();
  ring_->stop(std::uncaught_exceptions() == exceptions_);
  ring_thread_.join();
}

void Watchdog::add(Watched& watched) {
  const std::lock_guard lock(mutex_);
  watched_.push_back(&watched);
}

void Watchdog::remove(Watched& watched) {
  const std::lock_guard lock(mutex_);
  std::erase(watched_, &watched);
}

void Watchdog::expect_end(const std::string& reason) {
  ring_->leave_at(Watched::Clock::now() + limits_.silence, reason);
}

void Watchdog::inspect() {
  const auto interval = std::max(Milliseconds(1), limits_.heartbeat / 4);
  std::unique_lock lock(mutex_);
  while (!stop_.wait_for(lock, interval, [this] { return stopping_; })) {
    std::vector<Watched::Wait> waits;
    std::string failure;
    for (Watched* watched : watched_) {
      if (std::optional<Watched::Wait> wait = watched->oldest_wait()) waits.push_back(std::move(*wait));
      if (failure.empty()) failure = watched->failure();
    }
    std::sort(waits.begin(), waits.end(), [](const auto& a, const auto& b) { return a.since < b.since; });
    const Watched::Clock::time_point now = Watched::Clock::now();
    ring_->set_waits(waits);
    if (!failure.empty()) ring_->leave_at(now + limits_.grace, failure);
    if (!waits.empty() && now - waits[0].since > limits_.stall)
      ring_->leave_at(now, fmt::format("{} has not finished in {:.0f} s", waits[0].what,
                                       std::chrono::duration<double>(now - waits[0].since).count()));
  }
}

std::shared_ptr<Watchdog> Processes::watchdog() {
  if (!watchdog_)
    watchdog_ = std::make_shared<Watchdog>(rank(), size(), [this](const std::string& mine) {
      std::string all;
      for (const std::string& text : gather(mine)) all += text + '\n';
      std::istringstream lines(broadcast(all, 0));
      std::vector<std::string> texts;
      for (std::string line; std::getline(lines, line);) texts.push_back(line);
      return texts;
    });
  return watchdog_;
}

}  // namespace optimus
