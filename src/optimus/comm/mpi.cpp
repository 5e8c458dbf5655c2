// The processes of an MPI launcher, and communicators over CPU memory between them.
//
// A group moves its data by messages between pairs of ranks (Exchange). MPI matches the messages of a pair, a tag and a
// communicator in the order they were started, and all ranks of a group start the same collectives in the same order,
// so one tag serves all collectives, however many are under way. Sums are made by each rank itself, in rank order, when
// it waits (rank_sum.h), since MPI promises no order.
//
// Failures. Every MPI call is checked and throws. After that, or when an exception leaves a transfer unfinished, the
// peers are at an unknown place and may never come: from then on nothing here waits for anybody. Calls throw,
// destructors return, and MPI_Finalize is left out, so that the exception gets out and the program ends with
// Processes::abort() or, failing that, by leaving, upon which the launcher ends the others.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>

#include <mpi.h>

#include "optimus/base/log.h"
#include "optimus/comm/contracts.h"
#include "optimus/comm/processes.h"
#include "optimus/comm/rank_sum.h"

namespace optimus {
namespace {

/// Longer messages are cut: MPI counts bytes in an int.
constexpr int64_t kLargestMessage = int64_t{16} << 20;
/// What an all-reduce gathers at a time, of all ranks together.
constexpr int64_t kReduceBytes = int64_t{1} << 20;
constexpr int kCollectiveTag = 0, kMessageTag = 1;

/// MPI from its start to its end.
struct Session {
  Session() = default;
  ~Session() {
    if (!broken && std::uncaught_exceptions() == exceptions) MPI_Finalize();
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int rank = 0;
  bool broken = false;
  const int exceptions = std::uncaught_exceptions();
};

/// Runs a call of MPI for a Group; the message of its failure names the operation and the call.
#define OPTIMUS_MPI(group, operation, call) (group).check((operation), #call, [&] { return call; })

/// A communicator of MPI and what errors say of it.
class Group {
 public:
  /// Takes over `comm`.
  Group(std::shared_ptr<Session> session, std::string name, MPI_Comm comm)
      : session(std::move(session)), name(std::move(name)), comm(comm) {
    OPTIMUS_MPI(*this, "start", MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN));
    OPTIMUS_MPI(*this, "start", MPI_Comm_rank(comm, &rank));
    OPTIMUS_MPI(*this, "start", MPI_Comm_size(comm, &size));
  }
  ~Group() {
    if (comm != MPI_COMM_WORLD && !session->broken && std::uncaught_exceptions() == 0) MPI_Comm_free(&comm);
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  template <typename Call>
  void check(std::string_view operation, std::string_view expression, Call&& call) {
    require(!session->broken, ErrorKind::kCommunication, "rank {}, group {}: {} after an earlier failure",
            session->rank, name, operation);
    const int code = call();
    if (code == MPI_SUCCESS) return;
    session->broken = true;
    std::array<char, MPI_MAX_ERROR_STRING> text{};
    int length = 0;
    MPI_Error_string(code, text.data(), &length);
    fail(ErrorKind::kCommunication, "rank {}, group {}, {}: {}: {}", session->rank, name, operation, expression,
         std::string_view(text.data(), size_t(length)));
  }

  std::shared_ptr<Session> session;
  std::string name;
  MPI_Comm comm;
  int rank = 0, size = 0;
};

/// Messages under way, and what is left to do when all are through.
class Exchange final : public Transfer {
 public:
  Exchange(std::shared_ptr<Group> group, std::string_view operation)
      : group_(std::move(group)), operation_(operation) {}
  ~Exchange() override {
    if (done_ || group_->session->broken) return;
    if (std::uncaught_exceptions() > exceptions_) {
      group_->session->broken = true;
      return;
    }
    try {
      wait();
    } catch (const std::exception& error) {
      log().error("{}", error.what());
    }
  }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// Sends wait for their receivers whatever their size, so that a deadlock shows with the smallest message.
  void send(const std::byte* data, int64_t bytes, int to, int tag) {
    for (int64_t at = 0; at < bytes; at += kLargestMessage) {
      const int count = int(std::min(kLargestMessage, bytes - at));
      Message& message = messages_.emplace_back();
      OPTIMUS_MPI(*group_, operation_, MPI_Issend(data + at, count, MPI_BYTE, to, tag, group_->comm, &message.request));
    }
  }
  void receive(std::byte* data, int64_t bytes, int from, int tag) {
    for (int64_t at = 0; at < bytes; at += kLargestMessage) {
      const int count = int(std::min(kLargestMessage, bytes - at));
      Message& message = messages_.emplace_back();
      message.received = count;
      OPTIMUS_MPI(*group_, operation_,
                  MPI_Irecv(data + at, count, MPI_BYTE, from, tag, group_->comm, &message.request));
    }
  }
  void finally(std::function<void()> last) { last_ = std::move(last); }

  void wait() override {
    if (done_) return;
    for (; next_ < messages_.size(); ++next_) {
      Message& message = messages_[next_];
      MPI_Status status;
      OPTIMUS_MPI(*group_, operation_, MPI_Wait(&message.request, &status));
      check_received(message, status);
    }
    done_ = true;
    if (last_) last_();
  }

  void progress() override {
    for (int arrived = 1; next_ < messages_.size(); ++next_) {
      Message& message = messages_[next_];
      MPI_Status status;
      OPTIMUS_MPI(*group_, operation_, MPI_Test(&message.request, &arrived, &status));
      if (!arrived) return;
      check_received(message, status);
    }
  }

 private:
  struct Message {
    MPI_Request request = MPI_REQUEST_NULL;
    int received = -1;  ///< bytes that must arrive; -1: this rank sends
  };

  /// MPI itself reports messages that are too long, but not those that are too short.
  void check_received(const Message& message, MPI_Status& status) {
    if (message.received < 0) return;
    int count = 0;
    OPTIMUS_MPI(*group_, operation_, MPI_Get_count(&status, MPI_BYTE, &count));
    if (count == message.received) return;
    group_->session->broken = true;
    fail(ErrorKind::kCommunication, "rank {}, group {}, {}: {} bytes from the group's rank {}, expected {}",
         group_->session->rank, group_->name, operation_, count, status.MPI_SOURCE, message.received);
  }

  std::shared_ptr<Group> group_;
  std::string_view operation_;
  std::vector<Message> messages_;
  size_t next_ = 0;  ///< messages before it are through
  std::function<void()> last_;
  bool done_ = false;
  const int exceptions_ = std::uncaught_exceptions();
};

void broadcast_bytes(Group& group, void* data, int64_t bytes, int root) {
  for (int64_t at = 0; at < bytes; at += kLargestMessage) {
    const int count = int(std::min(kLargestMessage, bytes - at));
    OPTIMUS_MPI(group, "broadcast", MPI_Bcast(static_cast<std::byte*>(data) + at, count, MPI_BYTE, root, group.comm));
  }
}

std::byte* bytes_of(const Tensor& x) {
  expects(x || x.elements() == 0, "a tensor {} without memory cannot be moved", x.shape);
  return static_cast<std::byte*>(x.data);
}

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  int rank() const override { return group_->rank; }
  int size() const override { return group_->size; }

  // Small tensors are gathered whole; of others each rank sums a piece, and the pieces are gathered. The same sums.
  void all_reduce(Tensor x) override {
    check_all_reduce(x);
    const int64_t element = size_of(x.dtype);
    const int64_t at_once = kReduceBytes / element;
    const Tensor flat = x.reshape({x.elements()});
    for (int64_t at = 0; at < x.elements(); at += at_once) {
      const Tensor chunk = flat.slice(at, std::min(at_once, x.elements() - at));
      if (chunk.bytes() * size() <= kReduceBytes) reduce_gathered(chunk);
      else reduce_pieces(chunk);
    }
  }

  void broadcast(Tensor x, int root) override {
    check_broadcast(*this, x, root);
    broadcast_bytes(*group_, bytes_of(x), x.bytes(), root);
  }

  void barrier() override { OPTIMUS_MPI(*group_, "barrier", MPI_Barrier(group_->comm)); }

  Pending start_reduce_scatter(Tensor whole, Tensor part, Tensor scratch) override {
    check_reduce_scatter(*this, whole, part, scratch);
    return exchange_pieces(whole, part, scratch);
  }
  bool reduce_needs_scratch() const override { return true; }

  Pending start_all_gather(Tensor part, Tensor whole) override {
    check_all_gather(*this, part, whole);
    const int64_t piece = part.bytes();
    std::byte *from = bytes_of(part), *to = bytes_of(whole);
    auto exchange = std::make_unique<Exchange>(group_, "all_gather");
    for_others([&](int r) { exchange->receive(to + r * piece, piece, r, kCollectiveTag); });
    for_others([&](int r) { exchange->send(from, piece, r, kCollectiveTag); });
    copy_own(from, to + rank() * piece, piece);
    return exchange;
  }

  Pending start_all_to_all(Tensor send, std::span<const int64_t> send_rows, Tensor receive,
                           std::span<const int64_t> receive_rows) override {
    check_all_to_all(*this, send, send_rows, receive, receive_rows);
    const int64_t row = row_bytes(send);
    std::byte *from = bytes_of(send), *to = bytes_of(receive);
    std::vector<int64_t> sent(send_rows.size()), received(receive_rows.size());  // rows before each rank's
    std::exclusive_scan(send_rows.begin(), send_rows.end(), sent.begin(), int64_t{0});
    std::exclusive_scan(receive_rows.begin(), receive_rows.end(), received.begin(), int64_t{0});
    auto exchange = std::make_unique<Exchange>(group_, "all_to_all");
    for_others([&](int r) {
      exchange->receive(to + received[size_t(r)] * row, receive_rows[size_t(r)] * row, r, kCollectiveTag);
    });
    for_others(
        [&](int r) { exchange->send(from + sent[size_t(r)] * row, send_rows[size_t(r)] * row, r, kCollectiveTag); });
    const auto own = size_t(rank());
    copy_own(from + sent[own] * row, to + received[own] * row, send_rows[own] * row);
    return exchange;
  }

  Pending start_send(Tensor x, int to) override {
    check_message(*this, x, to);
    auto exchange = std::make_unique<Exchange>(group_, "send");
    exchange->send(bytes_of(x), x.bytes(), to, kMessageTag);
    return exchange;
  }
  Pending start_receive(Tensor x, int from) override {
    check_message(*this, x, from);
    auto exchange = std::make_unique<Exchange>(group_, "receive");
    exchange->receive(bytes_of(x), x.bytes(), from, kMessageTag);
    return exchange;
  }

 private:
  void reduce_gathered(Tensor x) {
    std::vector<std::byte> gathered(size_t(x.bytes() * size()));
    OPTIMUS_MPI(
        *group_, "all_reduce",
        MPI_Allgather(x.data, int(x.bytes()), MPI_BYTE, gathered.data(), int(x.bytes()), MPI_BYTE, group_->comm));
    std::vector<const void*> pieces;
    for (int r = 0; r < size(); ++r) pieces.push_back(gathered.data() + r * x.bytes());
    sum_in_rank_order(x.dtype, pieces, x.data, x.elements());
  }
  /// Through buffers that end with padding, so that all pieces are equally long.
  void reduce_pieces(Tensor x) {
    const int64_t piece = (x.elements() + size() - 1) / size(), bytes = piece * size() * size_of(x.dtype);
    std::vector<std::byte> padded(static_cast<size_t>(bytes)), other(padded.size());
    std::memcpy(padded.data(), x.data, size_t(x.bytes()));
    const Tensor whole(padded.data(), x.dtype, {piece * size()}), scratch(other.data(), x.dtype, whole.shape);
    const Tensor part = whole.slice(rank() * piece, piece);
    exchange_pieces(whole, part, scratch)->wait();
    all_gather(part, whole);
    std::memcpy(x.data, padded.data(), size_t(x.bytes()));
  }
  Pending exchange_pieces(Tensor whole, Tensor part, Tensor scratch) {
    const int64_t piece = part.bytes();
    std::byte *from = bytes_of(whole), *to = bytes_of(scratch);
    auto exchange = std::make_unique<Exchange>(group_, "reduce_scatter");
    for_others([&](int r) { exchange->receive(to + r * piece, piece, r, kCollectiveTag); });
    for_others([&](int r) { exchange->send(from + r * piece, piece, r, kCollectiveTag); });
    std::vector<const void*> pieces;
    for (int r = 0; r < size(); ++r) pieces.push_back((r == rank() ? from : to) + r * piece);
    exchange->finally(
        [pieces = std::move(pieces), part] { sum_in_rank_order(part.dtype, pieces, part.data, part.elements()); });
    return exchange;
  }
  /// f(r) for all other ranks, each rank beginning elsewhere so that they do not all crowd the same one.
  template <typename F>
  void for_others(F&& f) const {
    for (int k = 1; k < size(); ++k) f((rank() + k) % size());
  }
  static void copy_own(const std::byte* from, std::byte* to, int64_t bytes) {
    if (from != to && bytes > 0) std::memcpy(to, from, size_t(bytes));
  }

  std::shared_ptr<Group> group_;
};

class MpiProcesses final : public Processes {
 public:
  explicit MpiProcesses(std::shared_ptr<Group> world) : world_(std::move(world)) {
    MPI_Comm here = MPI_COMM_NULL;
    OPTIMUS_MPI(*world_, "start",
                MPI_Comm_split_type(world_->comm, MPI_COMM_TYPE_SHARED, world_->rank, MPI_INFO_NULL, &here));
    const Group machine(world_->session, "machine", here);
    local_rank_ = machine.rank;
    local_size_ = machine.size;
  }

  int rank() const override { return world_->rank; }
  int size() const override { return world_->size; }
  int local_rank() const override { return local_rank_; }
  int local_size() const override { return local_size_; }

  int64_t max(int64_t value) override {
    int64_t largest = 0;
    OPTIMUS_MPI(*world_, "max", MPI_Allreduce(&value, &largest, 1, MPI_INT64_T, MPI_MAX, world_->comm));
    return largest;
  }

  std::string broadcast(const std::string& text, int root) override {
    expects(root >= 0 && root < size(), "broadcast: root {} of {} processes", root, size());
    auto length = int64_t(text.size());
    broadcast_bytes(*world_, &length, sizeof(length), root);
    std::string out = rank() == root ? text : std::string(size_t(length), '\0');
    broadcast_bytes(*world_, out.data(), length, root);
    return out;
  }

  std::vector<std::string> gather(const std::string& text) override {
    const auto length = int64_t(text.size());
    std::vector<int64_t> lengths(rank() == 0 ? size_t(size()) : 0);
    OPTIMUS_MPI(*world_, "gather",
                MPI_Gather(&length, 1, MPI_INT64_T, lengths.data(), 1, MPI_INT64_T, 0, world_->comm));
    std::vector<std::string> texts(lengths.size());
    Exchange exchange(world_, "gather");
    if (rank() != 0) exchange.send(reinterpret_cast<const std::byte*>(text.data()), length, 0, kCollectiveTag);
    for (size_t r = 1; r < texts.size(); ++r) {
      texts[r].resize(size_t(lengths[r]));
      exchange.receive(reinterpret_cast<std::byte*>(texts[r].data()), lengths[r], int(r), kCollectiveTag);
    }
    exchange.wait();
    if (rank() == 0) texts[0] = text;
    return texts;
  }

  void barrier() override { OPTIMUS_MPI(*world_, "barrier", MPI_Barrier(world_->comm)); }

  [[noreturn]] void abort(int code) override {
    log().flush();
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, code);
    std::_Exit(code);
  }

  std::unique_ptr<Communicator> make_communicator(const std::string& name, const std::vector<int>& ranks) override {
    bool member = false;
    for (size_t i = 0; i < ranks.size(); ++i) {
      expects(ranks[i] >= 0 && ranks[i] < size() && (i == 0 || ranks[i - 1] < ranks[i]),
              "group {} with rank {} of {} in place {}, expected ascending ones", name, ranks[i], size(), i);
      member |= ranks[i] == rank();
    }
    expects(member, "rank {} makes group {} without belonging to it", rank(), name);
    if (ranks.size() == 1) return make_self_communicator();

    MPI_Group all = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
    MPI_Comm comm = MPI_COMM_NULL;
    OPTIMUS_MPI(*world_, name, MPI_Comm_group(world_->comm, &all));
    OPTIMUS_MPI(*world_, name, MPI_Group_incl(all, int(ranks.size()), ranks.data(), &members));
    OPTIMUS_MPI(*world_, name, MPI_Comm_create_group(world_->comm, members, kCollectiveTag, &comm));
    MPI_Group_free(&members);
    MPI_Group_free(&all);
    return std::make_unique<MpiCommunicator>(std::make_shared<Group>(world_->session, name, comm));
  }

 private:
  std::shared_ptr<Group> world_;
  int local_rank_ = 0, local_size_ = 0;
};

class SingleProcess final : public Processes {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int local_rank() const override { return 0; }
  int local_size() const override { return 1; }
  int64_t max(int64_t value) override { return value; }
  std::string broadcast(const std::string& text, int root) override {
    expects(root == 0, "broadcast: root {} of 1 process", root);
    return text;
  }
  std::vector<std::string> gather(const std::string& text) override { return {text}; }
  void barrier() override {}
  [[noreturn]] void abort(int code) override {
    log().flush();
    std::fflush(nullptr);
    std::_Exit(code);
  }
  std::unique_ptr<Communicator> make_communicator(const std::string& name, const std::vector<int>& ranks) override {
    expects(ranks == std::vector<int>{0}, "group {} of a single process", name);
    return make_self_communicator();
  }
};

/// Processes that the launcher says it started: 1 without a launcher, 0 where it tells ranks only. What a batch system
/// has reserved (SLURM_NTASKS, ...) does not count: it is there without a launcher, too.
int64_t launched_processes() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})
    if (const char* value = std::getenv(name)) return std::atoll(value);
  for (const char* name : {"PMIX_RANK", "PMI_RANK", "PALS_RANKID"})
    if (std::getenv(name)) return 0;
  return 1;
}

}  // namespace

std::shared_ptr<Processes> make_single_process() { return std::make_shared<SingleProcess>(); }

std::shared_ptr<Processes> start_processes() {
  const int64_t launched = launched_processes();
  if (launched == 1) return make_single_process();

  int started = 0;
  MPI_Initialized(&started);
  expects(!started, "start_processes() was called twice");
  // Streams that share one of a GPU's hardware queues wait for each other: messages that wait for a peer must not hold
  // up others. The driver reads it when it starts, which some MPI do in their own start.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  int provided = MPI_THREAD_SINGLE;
  const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  require(code == MPI_SUCCESS, ErrorKind::kCommunication, "MPI does not start (error {})", code);
  const auto session = std::make_shared<Session>();
  const auto world = std::make_shared<Group>(session, "world", MPI_COMM_WORLD);
  session->rank = world->rank;
  require(provided >= MPI_THREAD_FUNNELED, ErrorKind::kCommunication,
          "this MPI cannot be used by a program with threads (level {}, MPI_THREAD_FUNNELED is {})", provided,
          MPI_THREAD_FUNNELED);
  require(launched == 0 || launched == world->size, ErrorKind::kCommunication,
          "the launcher started {} processes, but MPI joined {}: is the launcher another MPI's than the one that "
          "Optimus is linked with?",
          launched, world->size);
  return std::make_shared<MpiProcesses>(world);
}

}  // namespace optimus
