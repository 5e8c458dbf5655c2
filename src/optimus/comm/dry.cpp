// A group that moves nothing and remembers what it would have moved.
#include "optimus/comm/communicator.h"

namespace optimus {
namespace {

class DryCommunicator final : public Communicator {
 public:
  DryCommunicator(int rank, int size, std::vector<MessageRecord>& messages)
      : rank_(rank), size_(size), messages_(messages) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  // What a rank sends at least: a reduced or gathered buffer less its own part, twice for the all-reduce.
  void all_reduce(Tensor x) override { record("all_reduce", 2 * others(x.bytes())); }
  void reduce_scatter(Tensor whole, Tensor) override { record("reduce_scatter", others(whole.bytes())); }
  void all_gather(Tensor, Tensor whole) override { record("all_gather", others(whole.bytes())); }
  void broadcast(Tensor x, int root) override {
    record("broadcast", rank_ == root && size_ > 1 ? double(x.bytes()) : 0);
  }
  void barrier() override { record("barrier", 0); }

 private:
  double others(int64_t bytes) const { return double(bytes) * (size_ - 1) / size_; }
  void record(std::string_view operation, double bytes) { messages_.push_back({operation, bytes}); }

  int rank_, size_;
  std::vector<MessageRecord>& messages_;
};

}  // namespace

std::unique_ptr<Communicator> make_dry_communicator(int rank, int size, std::vector<MessageRecord>& messages) {
  return std::make_unique<DryCommunicator>(rank, size, messages);
}

}  // namespace optimus
