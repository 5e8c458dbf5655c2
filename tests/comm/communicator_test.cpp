// Groups that need no other process: the group of one, and a planned group's volumes by the ring formulas; what every
// group refuses; and the sum in rank order.
#include "optimus/comm/communicator.h"

#include <array>
#include <numeric>

#include <gtest/gtest.h>

#include "optimus/comm/processes.h"
#include "optimus/comm/rank_sum.h"
#include "optimus/comm/timed.h"
#include "optimus/tensor/device.h"

namespace optimus::test {
namespace {

using Counts = std::vector<int64_t>;

TEST(SelfCommunicator, ChangesNothingInPlace) {
  const auto self = make_self_communicator();
  float values[4] = {1, 2, 3, 4};
  const Tensor x(values, DType::f32, {4});
  self->all_reduce(x);
  self->reduce_scatter(x, x, {});
  self->all_gather(x, x);
  self->broadcast(x, 0);
  self->barrier();
  EXPECT_EQ(self->rank(), 0);
  EXPECT_EQ(self->size(), 1);
  EXPECT_FALSE(self->reduce_needs_scratch());
  for (int i = 0; i < 4; ++i) EXPECT_EQ(values[i], float(i + 1));
}

TEST(SelfCommunicator, CopiesBetweenDifferentTensors) {
  const auto self = make_self_communicator();
  const std::array<float, 6> source = {1, 2, 3, 4, 5, 6};
  std::array<float, 6> from = source, to{};
  const Tensor a(from.data(), DType::f32, {3, 2}), b(to.data(), DType::f32, {3, 2});
  self->reduce_scatter(a, b, {});
  EXPECT_EQ(to, source);
  to.fill(0);
  self->all_gather(a, b);
  EXPECT_EQ(to, source);
  to.fill(0);
  self->start_all_to_all(a, Counts{2}, b, Counts{2})->wait();
  EXPECT_EQ(to, (std::array<float, 6>{1, 2, 3, 4, 0, 0}));
}

TEST(SelfCommunicator, CopiesByTheMemorysOwnMeans) {
  std::vector<std::array<int64_t, 3>> copies;
  const auto self = make_self_communicator([&](void* to, const void* from, int64_t bytes) {
    copies.push_back({int64_t(uintptr_t(to)), int64_t(uintptr_t(from)), bytes});
  });
  const auto device = make_dry_device(DeviceKind::cuda);
  const Tensor a(device->allocate(64), DType::i16, {8, 4}), b(device->allocate(64), DType::i16, {8, 4});
  self->all_gather(a, b);
  self->start_all_to_all(a, Counts{3}, b, Counts{3})->wait();
  self->all_gather(a, a);
  const int64_t to(uintptr_t(b.data)), from(uintptr_t(a.data));
  EXPECT_EQ(copies, (std::vector<std::array<int64_t, 3>>{{to, from, 64}, {to, from, 24}}));
}

TEST(SelfCommunicator, TouchesNoMemoryInPlaceNorWhereThereIsNone) {
  const auto self = make_self_communicator();
  const auto device = make_dry_device(DeviceKind::cpu);
  const Tensor dry(device->allocate(4096), DType::f32, {1024});  // reading or writing it would be a fault
  const Tensor no_rows(nullptr, DType::bf16, {0, 8});
  for (const Tensor& x : {dry, no_rows, Tensor{}}) {
    self->all_reduce(x);
    self->reduce_scatter(x, x, {});
    self->all_gather(x, x);
    self->broadcast(x, 0);
  }
  self->start_all_to_all(no_rows, Counts{0}, no_rows, Counts{0})->wait();
}

TEST(SelfCommunicator, HasNobodyToTalkTo) {
  const auto self = make_self_communicator();
  float value = 1;
  const Tensor x(&value, DType::f32, {1});
  EXPECT_THROW(self->start_send(x, 0), std::logic_error);
  EXPECT_THROW(self->start_receive(x, 0), std::logic_error);
  EXPECT_THROW(self->broadcast(x, 1), std::logic_error);
}

/// A device that computes nothing, at a time that the test sets.
class ClockDevice final : public Device {
 public:
  struct At final : Moment {
    explicit At(double at) : time(at) {}
    double seconds_since_wait(const Moment& earlier) const override {
      return time - dynamic_cast<const At&>(earlier).time;
    }
    double time;
  };
  DeviceKind kind() const override { return DeviceKind::cpu; }
  int64_t capacity() const override { return 0; }
  void* allocate(int64_t) override { return nullptr; }
  void release(void*, int64_t) override {}
  void from_host(Tensor, const void*) override {}
  void to_host_wait(void*, Tensor) override {}
  std::unique_ptr<Moment> moment() override { return std::make_unique<At>(now); }
  double now = 0;
};

/// A start takes a second, the first wait for it 10, an all-reduce 100.
class SlowCommunicator final : public Communicator {
 public:
  explicit SlowCommunicator(double& now) : now_(now) {}
  int rank() const override { return 1; }
  int size() const override { return 2; }
  void all_reduce(Tensor) override { now_ += 100; }
  void broadcast(Tensor, int) override { now_ += 100; }
  void barrier() override { now_ += 1000; }
  Pending start_reduce_scatter(Tensor, Tensor, Tensor) override { return start(); }
  bool reduce_needs_scratch() const override { return true; }
  Pending start_all_gather(Tensor, Tensor) override { return start(); }
  Pending start_all_to_all(Tensor, std::span<const int64_t>, Tensor, std::span<const int64_t>) override {
    return start();
  }
  Pending start_send(Tensor, int) override { return start(); }
  Pending start_receive(Tensor, int) override { return start(); }

 private:
  struct Slow final : Transfer {
    explicit Slow(double& at) : now(at) {}
    void wait() override { now += std::exchange(left, 0); }
    void progress() override { left -= 4; }
    double& now;
    double left = 10;
  };
  Pending start() {
    now_ += 1;
    return std::make_unique<Slow>(now_);
  }
  double& now_;
};

TEST(TimedCommunicator, CountsWaitsAndNothingElse) {
  ClockDevice device;
  Waits waits;
  const auto group = make_timed_communicator(std::make_unique<SlowCommunicator>(device.now), device, waits);
  EXPECT_EQ(group->rank(), 1);
  EXPECT_EQ(group->size(), 2);
  EXPECT_TRUE(group->reduce_needs_scratch());
  EXPECT_EQ(waits.take_wait(), 0);
  group->reduce_scatter({}, {}, {});
  const Pending pending[] = {group->start_all_gather({}, {}), group->start_all_to_all({}, {}, {}, {}),
                             group->start_send({}, 0), group->start_receive({}, 0)};
  EXPECT_EQ(waits.take_wait(), 10);
  device.now += 7;  // computing
  for (const Pending& transfer : pending) {
    transfer->wait();
    transfer->wait();
  }
  EXPECT_EQ(waits.take_wait(), 40);
  Pending advanced = group->start_send({}, 0);
  advanced->progress();
  finish(advanced);
  EXPECT_EQ(waits.take_wait(), 6);
  group->all_reduce({});
  group->broadcast({}, 0);
  group->barrier();
  EXPECT_EQ(waits.take_wait(), 200);
  EXPECT_EQ(waits.take_wait(), 0);
  EXPECT_EQ(device.now, 6 + 56 + 7 + 200 + 1000);
}

class DryCommunicatorTest : public testing::Test {
 protected:
  Tensor tensor(DType dtype, Shape shape) {
    return Tensor(device_->allocate(shape.elements() * size_of(dtype)), dtype, shape);
  }
  std::unique_ptr<Device> device_ = make_dry_device(DeviceKind::cuda);
  std::vector<MessageRecord> messages_;
  std::unique_ptr<Communicator> group_ = make_dry_communicator("dp", 3, 8, messages_);
};

TEST_F(DryCommunicatorTest, CountsWhatARankSends) {
  const int64_t bytes = 1 << 20;
  const Tensor whole = tensor(DType::bf16, {bytes / 2}), scratch = tensor(DType::bf16, {bytes / 2});
  const Tensor piece = whole.slice(3 * bytes / 16, bytes / 16);
  const Tensor rows = tensor(DType::f32, {40, 16}), received = tensor(DType::f32, {40, 16});
  ASSERT_TRUE(group_->reduce_needs_scratch());
  group_->reduce_scatter(whole, piece, scratch);
  group_->all_gather(piece, whole);
  group_->all_reduce(whole);
  group_->start_all_to_all(rows, Counts{1, 2, 3, 4, 5, 6, 7, 8}, received, Counts{0, 0, 9, 4, 0, 0, 0, 0})->wait();
  group_->start_send(rows, 4)->wait();
  group_->start_receive(rows, 2)->wait();
  group_->broadcast(rows, 3);
  group_->broadcast(rows, 0);
  group_->barrier();

  const std::vector<std::pair<std::string, double>> expected = {{"reduce_scatter", bytes * 7 / 8},
                                                                {"all_gather", bytes * 7 / 8},
                                                                {"all_reduce", 2 * bytes * 7 / 8},
                                                                {"all_to_all", (36 - 4) * 16 * 4},
                                                                {"send", 40 * 16 * 4},
                                                                {"receive", 0},
                                                                {"broadcast", 40 * 16 * 4},
                                                                {"broadcast", 0},
                                                                {"barrier", 0}};
  ASSERT_EQ(messages_.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(messages_[i].group, "dp");
    EXPECT_EQ(messages_[i].operation, expected[i].first);
    EXPECT_EQ(messages_[i].bytes, expected[i].second) << expected[i].first;
  }
}

TEST_F(DryCommunicatorTest, AGroupOfOneSendsNothing) {
  const auto alone = make_dry_communicator("ep", 0, 1, messages_);
  const Tensor x = tensor(DType::f32, {4, 4}), y = tensor(DType::f32, {4, 4});
  alone->reduce_scatter(x, x, y);
  alone->all_gather(x, x);
  alone->all_reduce(x);
  alone->broadcast(x, 0);
  alone->start_all_to_all(x, Counts{4}, y, Counts{4})->wait();
  ASSERT_EQ(messages_.size(), 5u);
  for (const MessageRecord& message : messages_) EXPECT_EQ(message.bytes, 0) << message.operation;
}

TEST_F(DryCommunicatorTest, RefusesWhatNoGroupCanDo) {
  const Tensor whole = tensor(DType::f32, {64}), scratch = tensor(DType::f32, {64}), apart = tensor(DType::f32, {8});
  const Tensor piece = whole.slice(24, 8);
  group_->reduce_scatter(whole, piece, scratch);
  EXPECT_THROW(group_->reduce_scatter(whole, whole.slice(16, 8), scratch), std::logic_error) << "another's piece";
  EXPECT_THROW(group_->reduce_scatter(whole, whole.slice(25, 8), scratch), std::logic_error) << "partly another's";
  EXPECT_THROW(group_->reduce_scatter(whole, tensor(DType::f32, {7}), scratch), std::logic_error) << "length";
  EXPECT_THROW(group_->reduce_scatter(whole, tensor(DType::bf16, {8}), scratch), std::logic_error) << "type";
  EXPECT_THROW(group_->reduce_scatter(whole, apart, {}), std::logic_error) << "no scratch";
  EXPECT_THROW(group_->reduce_scatter(whole, apart, whole), std::logic_error) << "scratch is the whole";
  EXPECT_THROW(group_->all_gather(whole.slice(0, 8), whole), std::logic_error) << "another's piece";
  const Tensor integers = tensor(DType::i32, {64});
  EXPECT_THROW(group_->reduce_scatter(integers, integers.slice(24, 8), tensor(DType::i32, {64})), std::logic_error);
  EXPECT_THROW(group_->all_reduce(tensor(DType::i64, {8})), std::logic_error) << "no sum of i64";
  EXPECT_THROW(group_->all_reduce(tensor(DType::f32, {8, 8}).column_slice(0, 4)), std::logic_error) << "pitch";
  EXPECT_THROW(group_->broadcast(whole, 8), std::logic_error) << "root";

  const Tensor rows = tensor(DType::f32, {8, 4}), received = tensor(DType::f32, {8, 4});
  const Counts each(8, 1);
  const auto all_to_all = [&](const Tensor& send, const Counts& sent, const Tensor& receive, const Counts& got) {
    group_->start_all_to_all(send, sent, receive, got)->wait();
  };
  all_to_all(rows, each, received, each);
  EXPECT_THROW(all_to_all(rows, Counts(7, 1), received, each), std::logic_error) << "too few counts";
  EXPECT_THROW(all_to_all(rows, Counts{1, 1, 1, 1, 1, 1, 1, 2}, received, each), std::logic_error) << "too many rows";
  EXPECT_THROW(all_to_all(rows, Counts{1, 1, 1, 1, -1, 1, 1, 1}, received, each), std::logic_error) << "negative";
  EXPECT_THROW(all_to_all(rows, each, received, Counts{1, 1, 1, 0, 1, 1, 1, 1}), std::logic_error) << "own rows";
  EXPECT_THROW(all_to_all(rows, each, tensor(DType::f32, {8, 5}), each), std::logic_error) << "row width";
  EXPECT_THROW(all_to_all(rows, each, rows, each), std::logic_error) << "overlap";

  EXPECT_THROW(group_->start_send(whole, 3), std::logic_error) << "to itself";
  EXPECT_THROW(group_->start_send(whole, 8), std::logic_error) << "to nobody";
}

TEST(SumInRankOrder, AddsInOrder) {
  const float big = 0x1p24f;  // big + 1 rounds to big
  const float first = big, second = 1, third = -big;
  float sum = 0;
  const auto sum_of = [&](const float& a, const float& b, const float& c) {
    sum_in_rank_order(DType::f32, std::vector<const void*>{&a, &b, &c}, &sum, 1);
    return sum;
  };
  EXPECT_EQ(sum_of(first, second, third), 0);
  EXPECT_EQ(sum_of(first, third, second), 1);
}

TEST(SumInRankOrder, RoundsBf16Once) {
  const bf16 one(1.0f), small(0x1p-8f);  // half a unit of 1's last place: adding it in bf16 never leaves 1
  bf16 sum;
  const std::vector<const void*> pieces = {&one, &small, &small, &small, &small};
  sum_in_rank_order(DType::bf16, pieces, &sum, 1);
  EXPECT_EQ(float(sum), 1 + 0x1p-6f);
}

TEST(SumInRankOrder, MayOverwriteAPieceAndDoesNotDependOnTheCut) {
  const int64_t count = 100'003;  // many blocks, all threads, an odd end
  std::vector<std::vector<float>> values(5, std::vector<float>(size_t(count)));
  for (size_t rank = 0; rank < values.size(); ++rank)
    for (size_t i = 0; i < size_t(count); ++i) values[rank][i] = float((i * 7919 + rank * 104729) % 1000003) * 0.37f;
  const auto pieces_at = [&](int64_t begin) {
    std::vector<const void*> pieces;
    for (const auto& v : values) pieces.push_back(v.data() + begin);
    return pieces;
  };
  std::vector<float> cut(size_t(count), 0.0f);
  for (int64_t begin = 0; begin < count; begin += 777)
    sum_in_rank_order(DType::f32, pieces_at(begin), cut.data() + begin, std::min<int64_t>(777, count - begin));
  sum_in_rank_order(DType::f32, pieces_at(0), values[2].data(), count);
  EXPECT_EQ(values[2], cut);
}

TEST(SingleProcess, IsAGroupOfOne) {
  const auto processes = make_single_process();
  EXPECT_EQ(processes->rank(), 0);
  EXPECT_EQ(processes->size(), 1);
  EXPECT_EQ(processes->local_rank(), 0);
  EXPECT_EQ(processes->local_size(), 1);
  EXPECT_EQ(processes->max(-5), -5);
  EXPECT_EQ(processes->broadcast("text", 0), "text");
  EXPECT_EQ(processes->gather("text"), std::vector<std::string>{"text"});
  EXPECT_EQ(processes->make_communicator("dp", {0})->size(), 1);
  EXPECT_THROW(processes->make_communicator("dp", {0, 1}), std::logic_error);
}

TEST(SingleProcess, AbortLeavesWithTheCode) {
  EXPECT_EXIT(make_single_process()->abort(7), testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace optimus::test
