// The group of one. A tensor that is both source and target is left alone, so that working in place needs no memory
// behind the tensors; anything else is a copy on the host.
#include <cstring>

#include "optimus/comm/contracts.h"

namespace optimus {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce(Tensor x) override { check_all_reduce(x); }
  void broadcast(Tensor x, int root) override { check_broadcast(*this, x, root); }
  void barrier() override {}

  Pending start_reduce_scatter(Tensor whole, Tensor part, Tensor scratch) override {
    check_reduce_scatter(*this, whole, part, scratch);
    return copy(whole.data, part.data, part.bytes());
  }
  bool reduce_needs_scratch() const override { return false; }

  Pending start_all_gather(Tensor part, Tensor whole) override {
    check_all_gather(*this, part, whole);
    return copy(part.data, whole.data, part.bytes());
  }

  Pending start_all_to_all(Tensor send, std::span<const int64_t> send_rows, Tensor receive,
                           std::span<const int64_t> receive_rows) override {
    check_all_to_all(*this, send, send_rows, receive, receive_rows);
    return copy(send.data, receive.data, send_rows[0] * row_bytes(send));
  }

  Pending start_send(Tensor, int, int) override { throw std::logic_error("a group of one has nobody to send to"); }
  Pending start_receive(Tensor, int, int) override {
    throw std::logic_error("a group of one has nobody to receive from");
  }

 private:
  static Pending copy(const void* from, void* to, int64_t bytes) {
    if (from != to && bytes > 0) std::memcpy(to, from, size_t(bytes));
    return std::make_unique<FinishedTransfer>();
  }
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator() { return std::make_unique<SelfCommunicator>(); }

}  // namespace optimus
