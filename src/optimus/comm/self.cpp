// The group of one. A tensor that is both source and target is left alone, so that working in place needs no memory
// behind the tensors; anything else is a copy by the memory's own means.
#include <cstring>

#include "optimus/comm/contracts.h"

namespace optimus {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  explicit SelfCommunicator(CopyBytes copy) : copy_(std::move(copy)) {}

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

  Pending start_send(Tensor, int) override { throw std::logic_error("a group of one has nobody to send to"); }
  Pending start_receive(Tensor, int) override { throw std::logic_error("a group of one has nobody to receive from"); }

 private:
  Pending copy(const void* from, void* to, int64_t bytes) const {
    if (from != to && bytes > 0) copy_(to, from, bytes);
    return std::make_unique<FinishedTransfer>();
  }

  CopyBytes copy_;
};

}  // namespace

std::unique_ptr<Communicator> make_self_communicator(CopyBytes copy) {
  return std::make_unique<SelfCommunicator>(std::move(copy));
}

std::unique_ptr<Communicator> make_self_communicator() {
  return make_self_communicator(
      [](void* to, const void* from, int64_t bytes) { std::memcpy(to, from, size_t(bytes)); });
}

}  // namespace optimus
