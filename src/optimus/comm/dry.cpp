// A group that moves nothing and remembers what its rank would have sent. With n ranks a ring sends (n-1)/n of the
// whole to scatter its sum or to gather it, and twice that to do both.
#include <numeric>

#include "optimus/comm/contracts.h"

namespace optimus {
namespace {

class DryCommunicator final : public Communicator {
 public:
  DryCommunicator(std::string group, int rank, int size, std::vector<MessageRecord>& messages, bool scratch)
      : group_(std::move(group)), rank_(rank), size_(size), messages_(messages), scratch_(scratch) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_reduce(Tensor x) override {
    check_all_reduce(x);
    record("all_reduce", 2 * ring(x));
  }
  void broadcast(Tensor x, int root) override {
    check_broadcast(*this, x, root);
    record("broadcast", rank_ == root && size_ > 1 ? double(x.bytes()) : 0);
  }
  void barrier() override { record("barrier", 0); }

  Pending start_reduce_scatter(Tensor whole, Tensor part, Tensor scratch) override {
    check_reduce_scatter(*this, whole, part, scratch);
    return record("reduce_scatter", ring(whole));
  }
  /// So that a plan has room for it.
  bool reduce_needs_scratch() const override { return scratch_; }

  Pending start_all_gather(Tensor part, Tensor whole) override {
    check_all_gather(*this, part, whole);
    return record("all_gather", ring(whole));
  }

  Pending start_all_to_all(Tensor send, std::span<const int64_t> send_rows, Tensor receive,
                           std::span<const int64_t> receive_rows) override {
    check_all_to_all(*this, send, send_rows, receive, receive_rows);
    const int64_t rows = std::accumulate(send_rows.begin(), send_rows.end(), int64_t{0});
    return record("all_to_all", double((rows - send_rows[size_t(rank_)]) * row_bytes(send)));
  }

  Pending start_send(Tensor x, int to) override {
    check_message(*this, x, to);
    return record("send", double(x.bytes()));
  }
  Pending start_receive(Tensor x, int from) override {
    check_message(*this, x, from);
    return record("receive", 0);
  }

 private:
  double ring(const Tensor& whole) const { return double(whole.bytes()) * (size_ - 1) / size_; }

  Pending record(std::string operation, double bytes) {
    messages_.push_back({group_, std::move(operation), bytes});
    return std::make_unique<FinishedTransfer>();
  }

  std::string group_;
  int rank_, size_;
  std::vector<MessageRecord>& messages_;
  bool scratch_;
};

}  // namespace

std::unique_ptr<Communicator> make_dry_communicator(std::string group, int rank, int size,
                                                    std::vector<MessageRecord>& messages, bool reduce_needs_scratch) {
  expects(size >= 1 && rank >= 0 && rank < size, "rank {} of a group of {}", rank, size);
  return std::make_unique<DryCommunicator>(std::move(group), rank, size, messages, reduce_needs_scratch);
}

}  // namespace optimus
