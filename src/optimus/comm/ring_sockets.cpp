// Each process listens on a port of the system's choice, tells all others the port and the machine's IPv4 addresses, and
// calls the next rank at one address after the other. Addresses may mean another machine there (containers' bridges,
// loopback), so both sides identify themselves: the caller says the run's random name and both ranks, the called process
// answers one byte if it is the one that was meant, and the caller, unless it has given up and calls again, confirms with
// one more. Calling and answering go on side by side, since all ranks wait for each other around the ring.
#include "optimus/comm/ring_sockets.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <utility>

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include "optimus/base/error.h"

namespace optimus {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kConnectTime(30000), kLongestAttempt(3000);
constexpr char kWelcome = 'w', kConfirmed = 'k';

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() { reset(); }
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept {
    reset(other.release());
    return *this;
  }
  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (fd_ >= 0) close(fd_);
    fd_ = fd;
  }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

Socket make_socket() {
  Socket out(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  require(out.open(), ErrorKind::kCommunication, "the watchdog gets no socket: {}", std::strerror(errno));
  return out;
}

/// Addresses of this machine, loopback last.
std::string own_addresses() {
  ifaddrs* list = nullptr;
  require(getifaddrs(&list) == 0, ErrorKind::kCommunication, "getifaddrs: {}", std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::string others, loopback;
  for (const ifaddrs* entry = list; entry; entry = entry->ifa_next) {
    if (!entry->ifa_addr || entry->ifa_addr->sa_family != AF_INET || !(entry->ifa_flags & IFF_UP)) continue;
    char text[INET_ADDRSTRLEN] = {};
    const auto* address = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
    if (!inet_ntop(AF_INET, &address->sin_addr, text, sizeof text)) continue;
    (entry->ifa_flags & IFF_LOOPBACK ? loopback : others) += fmt::format(" {}", text);
  }
  return others + loopback;
}

/// What a process tells the others: a random name for the run (the first rank's counts), port, addresses.
struct Announcement {
  explicit Announcement(const std::string& text) {
    std::istringstream in(text);
    in >> run >> port;
    for (std::string address; in >> address;) addresses.push_back(address);
  }
  std::string run;
  int port = 0;
  std::vector<std::string> addresses;
};

std::string greeting_of(const std::string& run, int from, int to) {
  return fmt::format("{} {:08} {:08}", run, from, to);
}

class Connecting {
 public:
  Connecting(int rank, int size, const std::function<std::vector<std::string>(const std::string&)>& exchange)
      : rank_(rank), next_((rank + 1) % size), listener_(make_socket()) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    socklen_t length = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    require(bind(listener_.fd(), generic, length) == 0 && listen(listener_.fd(), 64) == 0 &&
                getsockname(listener_.fd(), generic, &length) == 0,
            ErrorKind::kCommunication, "the watchdog of rank {} cannot listen: {}", rank, std::strerror(errno));
    std::random_device random;
    const std::vector<std::string> all = exchange(fmt::format(
        "{:08x}{:08x} {}{}", uint32_t(random()), uint32_t(random()), ntohs(address.sin_port), own_addresses()));
    expects(int(all.size()) == size, "{} announcements of {} ranks", all.size(), size);
    const std::string run = Announcement(all[0]).run;
    target_.emplace(all[size_t(next_)]);
    require(!target_->addresses.empty(), ErrorKind::kCommunication,
            "the watchdog cannot reach rank {}: its machine has no IPv4 address, not even a loopback's", next_);
    said_ = greeting_of(run, rank, next_);
    expected_ = greeting_of(run, (rank + size - 1) % size, rank);
  }

  RingSockets finish() {
    const Clock::time_point deadline = Clock::now() + kConnectTime;
    while (!reached_ || !previous_.open()) {
      require(Clock::now() < deadline, ErrorKind::kCommunication, "the watchdog of rank {} {}", rank_,
              reached_ ? std::string("was not called by the rank before it within 30 s")
                       : fmt::format("does not reach rank {} at port {} of any of {} within 30 s", next_, target_->port,
                                     fmt::join(target_->addresses, ", ")));
      if (!reached_ && !outgoing_.open()) call();
      wait();
      if (!reached_) advance_call();
      if (!previous_.open()) answer();
    }
    return {prepared(outgoing_.release()), prepared(previous_.release())};
  }

 private:
  /// Messages are single bytes that must not wait for company.
  static int prepared(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
  }

  void call() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(target_->port));
    const std::string& text = target_->addresses.at(attempt_++ % target_->addresses.size());
    if (inet_pton(AF_INET, text.c_str(), &address.sin_addr) != 1) return;
    outgoing_ = make_socket();
    greeted_ = false;
    // An address that leads nowhere answers nothing at all: however many there are, each has two attempts.
    give_up_ = Clock::now() + std::min(kLongestAttempt, kConnectTime / int64_t(2 * target_->addresses.size()));
    if (connect(outgoing_.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 && errno != EINPROGRESS)
      outgoing_.reset();
  }

  void wait() {
    std::vector<pollfd> events{{listener_.fd(), POLLIN, 0}};
    for (const Caller& caller : callers_) events.push_back({caller.socket.fd(), POLLIN, 0});
    if (!reached_ && outgoing_.open()) events.push_back({outgoing_.fd(), short(greeted_ ? POLLIN : POLLOUT), 0});
    poll(events.data(), events.size(), 50);
  }

  void advance_call() {
    if (!outgoing_.open()) return;
    if (!greeted_) {
      int error = 0;
      socklen_t length = sizeof error;
      getsockopt(outgoing_.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
      if (error != 0) return outgoing_.reset();
      // A fresh connection has room for the greeting. Before it stands, send() fails with EAGAIN or ENOTCONN.
      const ssize_t sent = send(outgoing_.fd(), said_.data(), said_.size(), MSG_NOSIGNAL);
      greeted_ = sent == ssize_t(said_.size());
    } else {
      char answer = 0;
      const ssize_t count = recv(outgoing_.fd(), &answer, 1, 0);
      if (count == 1 && answer == kWelcome && send(outgoing_.fd(), &kConfirmed, 1, MSG_NOSIGNAL) == 1) {
        reached_ = true;
        return;
      }
      if (count >= 0 || (errno != EAGAIN && errno != EINTR)) return outgoing_.reset();
    }
    if (Clock::now() > give_up_) outgoing_.reset();
  }

  void answer() {
    while (true) {
      Socket socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!socket.open()) break;
      callers_.push_back({std::move(socket)});
    }
    for (Caller& caller : callers_) {
      // Not a byte more than the greeting and its confirmation: what follows is the watchdog's.
      std::string& said = caller.said;
      char text[64];
      const ssize_t count = recv(caller.socket.fd(), text, expected_.size() + 1 - said.size(), 0);
      const bool ended = count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR);
      if (count > 0) said.append(text, size_t(count));
      if (said == expected_ + kConfirmed) {
        previous_ = std::move(caller.socket);
        return;
      }
      if (said == expected_ && !std::exchange(caller.welcomed, true))
        send(caller.socket.fd(), &kWelcome, 1, MSG_NOSIGNAL);
      if (ended || (said.size() >= expected_.size() && said != expected_)) caller.socket.reset();
    }
    std::erase_if(callers_, [](const Caller& caller) { return !caller.socket.open(); });
  }

  struct Caller {
    Socket socket;
    std::string said{};
    bool welcomed = false;
  };

  int rank_, next_;
  Socket listener_, outgoing_, previous_;
  std::vector<Caller> callers_;
  std::optional<Announcement> target_;
  std::string said_, expected_;
  size_t attempt_ = 0;
  bool greeted_ = false, reached_ = false;
  Clock::time_point give_up_{};
};

}  // namespace

RingSockets connect_ring(int rank, int size,
                         const std::function<std::vector<std::string>(const std::string& mine)>& exchange) {
  expects(size > 1 && rank >= 0 && rank < size, "a ring of {} with rank {}", size, rank);
  return Connecting(rank, size, exchange).finish();
}

}  // namespace optimus
