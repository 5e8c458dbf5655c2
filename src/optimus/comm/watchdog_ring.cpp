#include "optimus/comm/watchdog_ring.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "optimus/base/error.h"
#include "optimus/comm/ring_sockets.h"

namespace optimus {
namespace {

using std::chrono::milliseconds;

constexpr size_t kLongestText = 4000;
constexpr auto kFarewellTime = std::chrono::seconds(2);

double seconds(Watched::Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

}  // namespace

WatchdogRing::WatchdogRing(int rank, int size, const Watchdog::Exchange& exchange, const Watchdog::Limits& limits)
    : rank_(rank), size_(size), limits_(limits) {
  const RingSockets sockets = connect_ring(rank, size, exchange);
  links_[0].fd = sockets.next;
  links_[0].peer = (rank + 1) % size;
  links_[1].fd = sockets.previous;
  links_[1].peer = (rank + size - 1) % size;
  require(pipe2(wake_, O_CLOEXEC | O_NONBLOCK) == 0, ErrorKind::kCommunication, "pipe2: {}", std::strerror(errno));
}

WatchdogRing::~WatchdogRing() {
  for (const int fd : {links_[0].fd, links_[1].fd, wake_[0], wake_[1]})
    if (fd >= 0) close(fd);
}

void WatchdogRing::stop(bool farewell) {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    farewell_ = farewell;
  }
  (void)!write(wake_[1], "", 1);
}

void WatchdogRing::leave_at(Clock::time_point time, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (leave_at_ && *leave_at_ <= time) return;
    leave_at_ = time;
    reason_ = reason;
  }
  (void)!write(wake_[1], "", 1);
}

void WatchdogRing::set_waits(std::vector<Watched::Wait> waits) {
  const std::lock_guard lock(mutex_);
  waits_ = std::move(waits);
}

void WatchdogRing::run() {
  last_tick_ = next_beat_ = Clock::now();
  for (Link& link : links_) link.heard = last_tick_;
  while (true) {
    const int tick = int(std::clamp<int64_t>(limits_.heartbeat.count() / 4, 5, 250));
    wait_for_events(tick);
    const Clock::time_point now = Clock::now();
    // This process did not run itself: what its neighbours did meanwhile is unknown.
    if (now - last_tick_ > 2 * limits_.heartbeat + milliseconds(tick))
      for (Link& link : links_) link.heard = now;
    last_tick_ = now;
    for (Link& link : links_) receive(link);
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) break;
    }
    beat(now);
    check(now);
  }
  if (farewell_) say_farewell();
}

void WatchdogRing::wait_for_events(int milliseconds) {
  pollfd events[3] = {{wake_[0], POLLIN, 0}, {-1, POLLIN, 0}, {-1, POLLIN, 0}};  // poll() skips negative ones
  for (size_t i = 0; i < links_.size(); ++i) {
    events[i + 1].fd = links_[i].fd;
    if (!links_[i].out.empty()) events[i + 1].events |= POLLOUT;
  }
  poll(events, 3, milliseconds);
  char ignored[64];
  while (read(wake_[0], ignored, sizeof ignored) > 0) {
  }
}

void WatchdogRing::receive(Link& link) {
  char bytes[1024];
  while (link.fd >= 0) {
    const ssize_t count = recv(link.fd, bytes, sizeof bytes, 0);
    if (count > 0) {
      link.heard = Clock::now();
      link.in.append(bytes, size_t(count));
      take_messages(link);
    } else if (count == 0) {
      lost(link, "closed its connection");
    } else if (errno != EINTR) {
      if (errno != EAGAIN && errno != EWOULDBLOCK) lost(link, std::strerror(errno));
      return;
    }
  }
}

void WatchdogRing::take_messages(Link& link) {
  while (!link.in.empty()) {
    if (link.in[0] == 'g') {  // the other end waits for this one to close
      close(std::exchange(link.fd, -1));
      link.in.clear();
      return;
    }
    if (link.in[0] == 'f') {
      uint32_t length = 0;
      if (link.in.size() < 1 + sizeof length) return;
      std::memcpy(&length, link.in.data() + 1, sizeof length);
      if (length > kLongestText) return lost(link, "sends what is no message");
      if (link.in.size() < 1 + sizeof length + length) return;
      const std::string text = link.in.substr(1 + sizeof length, length);
      link.in.erase(0, 1 + sizeof length + length);
      spread(text, &link);
      leave_at(Clock::now() + std::min(limits_.grace, milliseconds(1000)), text);
    } else {
      link.in.erase(0, 1);
    }
  }
}

void WatchdogRing::flush(Link& link) {
  while (link.fd >= 0 && !link.out.empty()) {
    const ssize_t count = send(link.fd, link.out.data(), link.out.size(), MSG_NOSIGNAL);
    if (count > 0) link.out.erase(0, size_t(count));
    else if (errno != EINTR) return;  // a broken connection shows when it is read, after what still is there to read
  }
}

void WatchdogRing::beat(Clock::time_point now) {
  const bool due = now >= next_beat_;
  if (due) next_beat_ = now + limits_.heartbeat;
  for (Link& link : links_) {
    if (due && link.out.empty()) link.out += 'h';
    flush(link);
  }
}

void WatchdogRing::lost(Link& link, const char* how) {
  close(std::exchange(link.fd, -1));
  leave_at(Clock::now() + limits_.grace, fmt::format("rank {} has failed or was killed: the connection from rank {} to "
                                                     "it broke ({})",
                                                     link.peer, rank_, how));
}

void WatchdogRing::check(Clock::time_point now) {
  for (const Link& link : links_)
    if (link.fd >= 0 && now - link.heard > limits_.silence)
      leave_at(now, fmt::format("rank {} has given rank {} no sign of life for {:.1f} s", link.peer, rank_,
                                seconds(now - link.heard)));
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    over = leave_at_ && now >= *leave_at_;
  }
  if (over) leave(now);
}

/// Tells the neighbours, but for the one that brought the news, that the run has failed.
void WatchdogRing::spread(const std::string& text, const Link* from) {
  if (told_) return;
  told_ = true;
  const std::string cut = text.substr(0, kLongestText);
  const auto length = uint32_t(cut.size());
  for (Link& link : links_) {
    if (link.fd < 0 || &link == from) continue;
    link.out += 'f';
    link.out.append(reinterpret_cast<const char*>(&length), sizeof length);
    link.out += cut;
    flush(link);
  }
}

void WatchdogRing::leave(Clock::time_point now) {
  std::string text, reason;
  {
    const std::lock_guard lock(mutex_);
    reason = reason_;
    text = fmt::format("optimus: rank {} of {} leaves with exit code 5: {}.", rank_, size_, reason);
    if (waits_.empty()) text += " It waited for no transfer.";
    else text += " It waited for";
    for (size_t i = 0; i < waits_.size(); ++i)
      text += fmt::format("{} {}, for {:.1f} s{}", i == 0 ? "" : ";", waits_[i].what, seconds(now - waits_[i].since),
                          i + 1 == waits_.size() ? ".\n" : "");
    if (waits_.empty()) text += "\n";
  }
  spread(reason, nullptr);
  (void)!write(STDERR_FILENO, text.data(), text.size());
  // Bytes that were not read would make the system drop what is on its way to the neighbours.
  char ignored[1024];
  for (Link& link : links_)
    while (link.fd >= 0 && recv(link.fd, ignored, sizeof ignored, 0) > 0) {
    }
  // Destructors and exit handlers would wait for the peers.
  _exit(int(ErrorKind::kCommunication));
}

void WatchdogRing::say_farewell() {
  for (Link& link : links_) {
    link.out += 'g';
    flush(link);
    if (link.fd >= 0) shutdown(link.fd, SHUT_WR);
  }
  // Closing before the neighbour has read it could lose the farewell.
  const Clock::time_point until = Clock::now() + kFarewellTime;
  for (Link& link : links_)
    while (link.fd >= 0 && Clock::now() < until) {
      pollfd event{link.fd, POLLIN, 0};
      poll(&event, 1, 50);
      char ignored[1024];
      const ssize_t count = recv(link.fd, ignored, sizeof ignored, 0);
      if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) close(std::exchange(link.fd, -1));
    }
}

}  // namespace optimus
