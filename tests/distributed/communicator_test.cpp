// Every operation of the communicator, on every group of every layout of the ranks at hand. A rank's values are a
// function of its rank, so that each rank knows what all others hold and can compute the expected bits by itself.
#include "optimus/comm/communicator.h"

#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "distributed/machine.h"
#include "optimus/comm/mesh.h"

namespace optimus::test {
namespace {

using Bytes = std::vector<std::byte>;
using Counts = std::vector<int64_t>;

/// Elements on the host.
struct HostValues {
  HostValues(DType dtype, Shape shape)
      : dtype(dtype), shape(shape), bytes(size_t(shape.elements() * size_of(dtype)), std::byte{0xFF}) {}
  template <typename T>
  T* as() {
    return Tensor(bytes.data(), dtype, shape).as<T>();
  }

  DType dtype;
  Shape shape;
  Bytes bytes;
};

/// What the groups' memory belongs to; there while their tests run.
std::unique_ptr<Device> device;

/// Contiguous memory of a tensor on the device, all bits set until written.
struct Buffer {
  Buffer(const HostValues& values)
      : memory(std::make_unique<DeviceTensor>(*device, values.dtype, values.shape)), tensor(**memory) {
    device->from_host(tensor, values.bytes.data());
  }
  Buffer(DType dtype, Shape shape) : Buffer(HostValues(dtype, shape)) {}

  Bytes read() const { return memory->read_wait(); }

  std::unique_ptr<DeviceTensor> memory;
  Tensor tensor;
};

/// Elements [begin, begin + count).
Bytes piece_of(const Bytes& bytes, DType dtype, int64_t begin, int64_t count) {
  const int64_t size = size_of(dtype);
  return Bytes(bytes.begin() + begin * size, bytes.begin() + (begin + count) * size);
}

template <typename T>
T value_of(std::mt19937& generator) {
  const int digits = int(generator() % 2001) - 1000;
  if constexpr (std::is_integral_v<T>) return T(digits);
  // Sizes that differ by up to 2^16: in another order most sums come out otherwise.
  else return T(float(digits) * std::ldexp(1.0f, int(generator() % 17)) * 0.37f);
}

template <typename F>
auto with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16{});
    case DType::f64: return f(double{});
    case DType::i16: return f(int16_t{});
    case DType::i32: return f(int32_t{});
    case DType::i64: return f(int64_t{});
  }
  throw std::logic_error("type");
}

/// What that rank of the world holds.
HostValues values_of(int rank, DType dtype, Shape shape, uint32_t seed = 0) {
  HostValues out(dtype, shape);
  std::mt19937 generator(uint32_t(rank) * 7919 + seed);
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t i = 0; i < shape.elements(); ++i) out.as<T>()[i] = value_of<T>(generator);
  });
  return out;
}

/// The sum of those ranks' values, in their order.
HostValues sum_of(const std::vector<int>& ranks, DType dtype, Shape shape) {
  HostValues out(dtype, shape);
  std::vector<HostValues> values;
  for (int rank : ranks) values.push_back(values_of(rank, dtype, shape));
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    using Sum = std::conditional_t<std::is_same_v<T, bf16>, float, T>;
    for (int64_t i = 0; i < shape.elements(); ++i) {
      Sum sum(values[0].as<T>()[i]);
      for (size_t r = 1; r < values.size(); ++r) sum += Sum(values[r].as<T>()[i]);
      out.as<T>()[i] = T(sum);
    }
  });
  return out;
}

/// Expects elements [begin, begin + count) of the sum over those ranks: its bits, except where NCCL adds more than two
/// numbers. There each addition may be wrong by half a unit of the last place of what the absolute values add up to.
void expect_sum(const Bytes& got, const std::vector<int>& ranks, DType dtype, Shape shape, int64_t begin, int64_t count,
                const std::string& what) {
  HostValues expected = sum_of(ranks, dtype, shape);
  if (!on_gpus() || ranks.size() <= 2 || dtype == DType::i32) {
    EXPECT_EQ(got, piece_of(expected.bytes, dtype, begin, count)) << what;
    return;
  }
  std::vector<HostValues> values;
  for (int rank : ranks) values.push_back(values_of(rank, dtype, shape));
  const double unit = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f32 ? 0x1p-24 : 0x1p-53;
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    const auto number = [](const T& x) {
      if constexpr (std::is_same_v<T, bf16>) return double(float(x));
      else return double(x);
    };
    for (int64_t i = 0; i < count; ++i) {
      double size = 0;
      for (HostValues& of_rank : values) size += std::abs(number(of_rank.as<T>()[begin + i]));
      T element;
      std::memcpy(&element, got.data() + size_t(i) * sizeof(T), sizeof(T));
      ASSERT_NEAR(number(element), number(expected.as<T>()[begin + i]), 2 * double(ranks.size()) * unit * size)
          << what << ", element " << i;
    }
  });
}
void expect_sum(const Bytes& got, const std::vector<int>& ranks, DType dtype, Shape shape, const std::string& what) {
  expect_sum(got, ranks, dtype, shape, 0, shape.elements(), what);
}

class CommunicatorTest : public testing::Test {
 protected:
  struct Member {
    std::string name;
    std::vector<int> ranks;  ///< of the world
    std::unique_ptr<Communicator> group;
  };

  /// All groups of this rank in all layouts, each once; the world is the data-parallel group of the first.
  static void SetUpTestSuite() {
    const int world = processes().size(), rank = processes().rank();
    device = make_device();
    for (int pp = 1; pp <= world; ++pp)
      for (int ep = 1; ep <= world; ++ep) {
        if (world % pp != 0 || world / pp % ep != 0) continue;
        const MeshShape shape = make_mesh_shape(world, pp, ep);
        add("dp", dp_group(shape, rank));
        add("ep", ep_group(shape, rank));
        add("edp", edp_group(shape, rank));
        add("pp", pp_group(shape, rank));
        add("embedding", embedding_group(shape, rank));
      }
  }
  static void TearDownTestSuite() {
    while (!members_.empty()) members_.pop_back();
    device.reset();
  }

  template <typename Body>
  static void for_every_group(Body&& body) {
    for (const Member& member : members_) {
      SCOPED_TRACE(fmt::format("group {} of ranks {}", member.name, fmt::join(member.ranks, ",")));
      body(*member.group, member.ranks);
    }
  }
  static Communicator& world() { return *members_.front().group; }

 private:
  static void add(const std::string& name, const std::vector<int>& ranks) {
    if (std::find(ranks.begin(), ranks.end(), processes().rank()) == ranks.end()) return;  // a middle stage's embedding
    for (const Member& member : members_)
      if (member.ranks == ranks) return;
    members_.push_back({name, ranks, make_communicator(*device, name, ranks)});
  }

  static inline std::vector<Member> members_;
};

TEST_F(CommunicatorTest, KnowsItsPlace) {
  for_every_group([](Communicator& group, const std::vector<int>& ranks) {
    ASSERT_EQ(group.size(), int(ranks.size()));
    EXPECT_EQ(ranks[size_t(group.rank())], processes().rank());
    group.barrier();
  });
}

TEST_F(CommunicatorTest, AllReduceAddsInRankOrder) {
  for_every_group([](Communicator& group, const std::vector<int>& ranks) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i32})
      for (int64_t count : {0, 1, 1003}) {
        Buffer x = values_of(processes().rank(), dtype, {count});
        group.all_reduce(x.tensor);
        expect_sum(x.read(), ranks, dtype, {count}, fmt::format("{} {}", name_of(dtype), count));
      }
  });
}

// Longer than what goes through at a time, and not a multiple of it.
TEST_F(CommunicatorTest, AllReduceDoesNotDependOnTheCut) {
  if (on_gpus() && processes().size() > 2) GTEST_SKIP() << "NCCL's order of adding depends on it";
  const Shape shape{300'007};
  Buffer at_once = values_of(processes().rank(), DType::f32, shape);
  Buffer cut = values_of(processes().rank(), DType::f32, shape);
  world().all_reduce(at_once.tensor);
  for (int64_t begin = 0; begin < shape[0]; begin += 70'001)
    world().all_reduce(cut.tensor.slice(begin, std::min<int64_t>(70'001, shape[0] - begin)));
  EXPECT_EQ(at_once.read(), cut.read());
}

TEST_F(CommunicatorTest, AllReduceGivesEveryRankTheSameBits) {
  Buffer x = values_of(processes().rank(), DType::f32, {5001});
  world().all_reduce(x.tensor);
  const Bytes bytes = x.read();
  const std::string mine(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  EXPECT_TRUE(mine == processes().broadcast(mine, 0));
}

TEST_F(CommunicatorTest, BroadcastTakesTheRootsValues) {
  for_every_group([](Communicator& group, const std::vector<int>& ranks) {
    for (int root = 0; root < group.size(); ++root)
      for (int64_t rows : {0, 7}) {
        Buffer x = values_of(processes().rank(), DType::bf16, {rows, 5});
        group.broadcast(x.tensor, root);
        EXPECT_EQ(x.read(), values_of(ranks[size_t(root)], DType::bf16, {rows, 5}).bytes) << "root " << root;
      }
  });
}

TEST_F(CommunicatorTest, ReduceScatterGivesThisRanksPieceOfTheSum) {
  for_every_group([](Communicator& group, const std::vector<int>& ranks) {
    for (DType dtype : {DType::f32, DType::bf16})
      for (int64_t length : {0, 1, 333, 40'001})
        for (bool in_place : {false, true}) {
          const Shape shape{length * group.size()};
          Buffer whole = values_of(processes().rank(), dtype, shape), apart(dtype, {length});
          Buffer scratch(dtype, group.reduce_needs_scratch() ? shape : Shape{0});
          const int64_t begin = group.rank() * length;
          group.reduce_scatter(whole.tensor, in_place ? whole.tensor.slice(begin, length) : apart.tensor,
                               scratch.tensor);
          expect_sum(in_place ? piece_of(whole.read(), dtype, begin, length) : apart.read(), ranks, dtype, shape, begin,
                     length, fmt::format("{} {}{}", name_of(dtype), length, in_place ? " in place" : ""));
        }
  });
}

TEST_F(CommunicatorTest, AllGatherPutsThePartsInOrder) {
  for_every_group([](Communicator& group, const std::vector<int>& ranks) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i32, DType::i64})
      for (int64_t length : {0, 1, 77})
        for (bool in_place : {false, true}) {
          const HostValues mine = values_of(processes().rank(), dtype, {length});
          Buffer part = mine, whole(dtype, {length * group.size()});
          Tensor from = part.tensor;
          if (in_place) {
            from = whole.tensor.slice(group.rank() * length, length);
            device->from_host(from, mine.bytes.data());
          }
          group.all_gather(from, whole.tensor);
          const Bytes gathered = whole.read();
          for (int r = 0; r < group.size(); ++r)
            EXPECT_EQ(piece_of(gathered, dtype, r * length, length), values_of(ranks[size_t(r)], dtype, {length}).bytes)
                << name_of(dtype) << " " << length << " part " << r;
        }
  });
}

/// Uneven counts with zeros, different for every pair, in the given round.
int64_t rows_between(int from, int to, int round) { return round == 0 ? 0 : (from * 5 + to * 3 + round) % 4; }

TEST_F(CommunicatorTest, AllToAllBringsTheRowsOfEveryRank) {
  for_every_group([](Communicator& group, const std::vector<int>& ranks) {
    for (int round = 0; round < 5; ++round)
      for (const auto& [dtype, width] : {std::pair(DType::bf16, 3), {DType::f32, 8}, {DType::i32, 1}}) {
        const int me = group.rank();
        const auto counts_of = [&](int from) {
          Counts counts;
          for (int to = 0; to < group.size(); ++to) counts.push_back(rows_between(from, to, round));
          return counts;
        };
        const auto total = [](const Counts& counts) {
          return std::accumulate(counts.begin(), counts.end(), int64_t{0});
        };
        const auto shape_of = [width = width](int64_t rows) { return width == 1 ? Shape{rows} : Shape{rows, width}; };
        Counts received_rows;
        for (int from = 0; from < group.size(); ++from) received_rows.push_back(rows_between(from, me, round));

        const Counts sent_rows = counts_of(me);
        Buffer sent = values_of(processes().rank(), dtype, shape_of(total(sent_rows)));
        Buffer received(dtype, shape_of(total(received_rows) + 1));  // with a row to spare
        group.start_all_to_all(sent.tensor, sent_rows, received.tensor, received_rows)->wait();

        Bytes expected;
        for (int from = 0; from < group.size(); ++from) {
          const Counts counts = counts_of(from);
          const int64_t before = std::accumulate(counts.begin(), counts.begin() + me, int64_t{0});
          const HostValues theirs = values_of(ranks[size_t(from)], dtype, shape_of(total(counts)));
          const Bytes rows = piece_of(theirs.bytes, dtype, before * width, counts[size_t(me)] * width);
          expected.insert(expected.end(), rows.begin(), rows.end());
        }
        expected.insert(expected.end(), size_t(width * size_of(dtype)), std::byte{0xFF});
        EXPECT_EQ(received.read(), expected) << "round " << round << " " << name_of(dtype);
      }
  });
}

// Around the ring of the group: every rank sends two messages on, one of which may have no elements, and takes two.
TEST_F(CommunicatorTest, MessagesComeInOrder) {
  for_every_group([](Communicator& group, const std::vector<int>& ranks) {
    if (group.size() == 1) return;
    const int next = (group.rank() + 1) % group.size(), previous = (group.rank() + group.size() - 1) % group.size();
    const Shape long_shape{20'003}, short_shape{group.rank() % 2 == 0 ? 3 : 0, 5};
    const Shape short_from_previous{previous % 2 == 0 ? 3 : 0, 5};
    Buffer sent_long = values_of(processes().rank(), DType::f32, long_shape);
    Buffer sent_short = values_of(processes().rank(), DType::bf16, short_shape);
    Buffer long_one(DType::f32, long_shape), short_one(DType::bf16, short_from_previous);
    std::vector<Pending> pending;
    pending.push_back(group.start_send(sent_long.tensor, next));
    pending.push_back(group.start_send(sent_short.tensor, next));
    pending.push_back(group.start_receive(long_one.tensor, previous));
    pending.push_back(group.start_receive(short_one.tensor, previous));
    for (Pending& transfer : pending) finish(transfer);
    EXPECT_EQ(long_one.read(), values_of(ranks[size_t(previous)], DType::f32, long_shape).bytes);
    EXPECT_EQ(short_one.read(), values_of(ranks[size_t(previous)], DType::bf16, short_from_previous).bytes);
  });
}

TEST_F(CommunicatorTest, CutsLongMessages) {
  if (world().size() == 1) return;
  const int last = world().size() - 1;
  const Shape shape{(40 << 20) / 8 + 3};  // 40 MB and a little
  if (world().rank() == last) {
    HostValues values(DType::i64, shape);
    std::iota(values.as<int64_t>(), values.as<int64_t>() + shape[0], int64_t{5});
    Buffer x = values;
    world().start_send(x.tensor, 0)->wait();
  } else if (world().rank() == 0) {
    Buffer x(DType::i64, shape);
    world().start_receive(x.tensor, last)->wait();
    HostValues got(DType::i64, shape);
    got.bytes = x.read();
    int64_t wrong = 0;
    for (int64_t i = 0; i < shape[0]; ++i) wrong += got.as<int64_t>()[i] != i + 5;
    EXPECT_EQ(wrong, 0);
  }
}

// Reductions and gathers on all groups at once, several on each, polled, and waited for from the last to the first.
TEST_F(CommunicatorTest, ManyTransfersMayBeUnderWay) {
  struct Work {
    Buffer whole, scratch, sum, part, gathered;
    std::vector<int> ranks;
    int64_t begin;
    Bytes expected_gathered;
  };
  const int64_t length = 5001;
  std::vector<Work> works;  // which may move its buffers while it grows: their memory stays where it is
  std::vector<Pending> pending;
  for_every_group([&](Communicator& group, const std::vector<int>& ranks) {
    const Shape shape{length * group.size()};
    for (uint32_t repeat = 0; repeat < 3; ++repeat) {
      Bytes parts;
      for (int rank : ranks) {
        const Bytes part = values_of(rank, DType::f32, {length}, repeat).bytes;
        parts.insert(parts.end(), part.begin(), part.end());
      }
      works.push_back({values_of(processes().rank(), DType::f32, shape),
                       Buffer(DType::f32, group.reduce_needs_scratch() ? shape : Shape{0}),
                       Buffer(DType::f32, {length}), values_of(processes().rank(), DType::f32, {length}, repeat),
                       Buffer(DType::f32, shape), ranks, group.rank() * length, parts});
      const Work& work = works.back();
      pending.push_back(group.start_reduce_scatter(work.whole.tensor, work.sum.tensor, work.scratch.tensor));
      pending.push_back(group.start_all_gather(work.part.tensor, work.gathered.tensor));
    }
  });
  for (int poll = 0; poll < 10; ++poll)
    for (const Pending& transfer : pending) transfer->progress();
  for (auto transfer = pending.rbegin(); transfer != pending.rend(); ++transfer) {
    (*transfer)->wait();
    (*transfer)->wait();  // twice is harmless
  }
  for (const Work& work : works) {
    expect_sum(work.sum.read(), work.ranks, DType::f32, {length * int64_t(work.ranks.size())}, work.begin, length, "");
    EXPECT_TRUE(work.gathered.read() == work.expected_gathered);
  }
}

TEST_F(CommunicatorTest, DestroyingATransferWaits) {
  Buffer part = values_of(processes().rank(), DType::f32, {100'000});
  Buffer whole(DType::f32, {100'000 * world().size()});
  { const Pending forgotten = world().start_all_gather(part.tensor, whole.tensor); }
  const Bytes gathered = whole.read();
  for (int r = 0; r < world().size(); ++r)
    EXPECT_TRUE(piece_of(gathered, DType::f32, r * 100'000, 100'000) == values_of(r, DType::f32, {100'000}).bytes) << r;
}

TEST_F(CommunicatorTest, AGroupStaysUsableAfterWrongUse) {
  for_every_group([](Communicator& group, const std::vector<int>& ranks) {
    Buffer x = values_of(processes().rank(), DType::f32, {12});
    EXPECT_THROW(group.all_reduce(Buffer(DType::i64, {4}).tensor), std::logic_error);
    EXPECT_THROW(group.broadcast(x.tensor, group.size()), std::logic_error);
    EXPECT_THROW(group.start_send(x.tensor, group.rank()), std::logic_error);
    EXPECT_THROW(group.all_gather(x.tensor, Buffer(DType::f32, {12 * group.size() + 1}).tensor), std::logic_error);
    group.all_reduce(x.tensor);
    expect_sum(x.read(), ranks, DType::f32, {12}, "");
  });
}

}  // namespace
}  // namespace optimus::test
