// Groups that need no other process: the group of one, and a planned group's volumes by the ring formulas.
#include "optimus/comm/communicator.h"

#include <gtest/gtest.h>

#include "optimus/tensor/device.h"

namespace optimus::test {
namespace {

TEST(Communicator, AGroupOfOneChangesNothing) {
  const auto self = make_self_communicator();
  float values[4] = {1, 2, 3, 4};
  const Tensor x(values, DType::f32, {4});
  self->all_reduce(x);
  self->reduce_scatter(x, x);
  self->all_gather(x, x);
  self->broadcast(x, 0);
  self->barrier();
  EXPECT_EQ(self->size(), 1);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(values[i], float(i + 1));
}

TEST(Communicator, DryGroupCountsWhatARingSends) {
  std::vector<MessageRecord> messages;
  const auto group = make_dry_communicator(3, 8, messages);
  const auto device = make_dry_device(DeviceKind::cuda);
  const Tensor whole(device->allocate(1 << 20), DType::bf16, {1 << 19});
  group->reduce_scatter(whole, whole.slice(0, 1 << 16));
  group->all_gather(whole.slice(0, 1 << 16), whole);
  group->all_reduce(whole);
  ASSERT_EQ(messages.size(), 3u);
  EXPECT_EQ(messages[0].bytes, (1 << 20) * 7 / 8);
  EXPECT_EQ(messages[1].bytes, (1 << 20) * 7 / 8);
  EXPECT_EQ(messages[2].bytes, 2 * (1 << 20) * 7 / 8);
}

}  // namespace
}  // namespace optimus::test
