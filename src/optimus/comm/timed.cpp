#include "optimus/comm/timed.h"

namespace optimus {
namespace {

template <typename Wait>
void time_wait(Device& device, Waits& waits, Wait&& wait) {
  auto begin = device.moment();
  wait();
  waits.add(std::move(begin), device.moment());
}

class TimedTransfer final : public Transfer {
 public:
  TimedTransfer(Pending inner, Device& device, Waits& waits)
      : inner_(std::move(inner)), device_(device), waits_(waits) {}
  void wait() override {
    time_wait(device_, waits_, [&] { inner_->wait(); });
  }
  void progress() override { inner_->progress(); }

 private:
  Pending inner_;
  Device& device_;
  Waits& waits_;
};

class TimedCommunicator final : public Communicator {
 public:
  TimedCommunicator(std::unique_ptr<Communicator> inner, Device& device, Waits& waits)
      : inner_(std::move(inner)), device_(device), waits_(waits) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void all_reduce(Tensor x) override {
    time_wait(device_, waits_, [&] { inner_->all_reduce(x); });
  }
  void broadcast(Tensor x, int root) override {
    time_wait(device_, waits_, [&] { inner_->broadcast(x, root); });
  }
  void barrier() override { inner_->barrier(); }

  Pending start_reduce_scatter(Tensor whole, Tensor part, Tensor scratch) override {
    return timed(inner_->start_reduce_scatter(whole, part, scratch));
  }
  bool reduce_needs_scratch() const override { return inner_->reduce_needs_scratch(); }
  Pending start_all_gather(Tensor part, Tensor whole) override { return timed(inner_->start_all_gather(part, whole)); }
  Pending start_all_to_all(Tensor send, std::span<const int64_t> send_rows, Tensor receive,
                           std::span<const int64_t> receive_rows) override {
    return timed(inner_->start_all_to_all(send, send_rows, receive, receive_rows));
  }
  Pending start_send(Tensor x, int to) override { return timed(inner_->start_send(x, to)); }
  Pending start_receive(Tensor x, int from) override { return timed(inner_->start_receive(x, from)); }

 private:
  Pending timed(Pending transfer) const {
    return std::make_unique<TimedTransfer>(std::move(transfer), device_, waits_);
  }

  std::unique_ptr<Communicator> inner_;
  Device& device_;
  Waits& waits_;
};

}  // namespace

double Waits::take_wait() {
  double seconds = 0;
  for (const auto& [begin, end] : spans_) seconds += end->seconds_since_wait(*begin);
  spans_.clear();
  return seconds;
}

std::unique_ptr<Communicator> make_timed_communicator(std::unique_ptr<Communicator> inner, Device& device,
                                                      Waits& waits) {
  return std::make_unique<TimedCommunicator>(std::move(inner), device, waits);
}

}  // namespace optimus
