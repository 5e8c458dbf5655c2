// What processes tell each other on the host.
#include "distributed/processes.h"

#include <gtest/gtest.h>

namespace optimus::test {
namespace {

TEST(Processes, FindTheLargestNumber) {
  const int rank = processes().rank(), size = processes().size();
  EXPECT_EQ(processes().max(rank), size - 1);
  EXPECT_EQ(processes().max(-rank), 0);
  EXPECT_EQ(processes().max(rank == size / 2 ? int64_t{1} << 40 : 7), int64_t{1} << 40);
}

TEST(Processes, ShareOneMachineHere) {
  EXPECT_EQ(processes().local_size(), processes().size());
  EXPECT_EQ(processes().local_rank(), processes().rank());
}

std::string text_of(int rank, size_t length) {
  std::string text(length, '\0');
  for (size_t i = 0; i < length; ++i) text[i] = char(i * 31 + size_t(rank) * 7);  // zero bytes, too
  return text;
}

TEST(Processes, BroadcastTextsOfAnyLength) {
  for (int root = 0; root < processes().size(); ++root)
    for (size_t length : {size_t{0}, size_t{1}, size_t{1000}, size_t{3'000'000}})
      EXPECT_EQ(processes().broadcast(text_of(processes().rank(), length), root), text_of(root, length));
}

TEST(Processes, GatherTextsOfAnyLength) {
  for (size_t length : {size_t{0}, size_t{1}, size_t{1'000'000}}) {
    const auto text = [&](int rank) { return text_of(rank, length * size_t((rank + 1) % 3)); };
    const std::vector<std::string> texts = processes().gather(text(processes().rank()));
    ASSERT_EQ(int(texts.size()), processes().rank() == 0 ? processes().size() : 0);
    for (size_t rank = 0; rank < texts.size(); ++rank) EXPECT_EQ(texts[rank], text(int(rank)));
  }
}

TEST(Processes, RefuseGroupsThatCannotBe) {
  const int rank = processes().rank(), size = processes().size();
  EXPECT_THROW(processes().make_communicator("dp", {}), std::logic_error);
  EXPECT_THROW(processes().make_communicator("dp", {rank, size}), std::logic_error);
  EXPECT_THROW(processes().make_communicator("dp", {rank, rank}), std::logic_error);
  if (size == 1) return;
  EXPECT_THROW(processes().make_communicator("dp", {size - 1, 0}), std::logic_error) << "descending";
  EXPECT_THROW(processes().make_communicator("dp", {(rank + 1) % size}), std::logic_error) << "not a member";
  EXPECT_THROW(start_processes(), std::logic_error) << "twice";
}

}  // namespace
}  // namespace optimus::test
