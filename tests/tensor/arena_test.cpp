// Arenas: stack order, exact capacity, and the dry run's peak that sizes the real one.
#include "optimus/tensor/arena.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <set>

#include <gtest/gtest.h>

namespace optimus::test {
namespace {

/// A step with nested scopes; its peak is inside the second one.
void some_step(Arena& arena) {
  arena.allocate(DType::f32, {100}, "kept");
  {
    Arena::Scope scope(arena);
    arena.allocate(DType::bf16, {300}, "first");
  }
  {
    Arena::Scope scope(arena);
    arena.allocate(DType::f64, {64, 3}, "second");
    arena.allocate(DType::i32, {1}, "kept");
  }
  arena.allocate(DType::f32, {10}, "late");
}

TEST(Arena, ScopesGiveBackInStackOrder) {
  const auto device = make_cpu_device();
  Arena arena(*device, "test", 4096);
  const Tensor a = arena.allocate(DType::f32, {3}, "a");
  EXPECT_EQ(arena.used(), Arena::kAlignment);
  void* reused = nullptr;
  {
    Arena::Scope scope(arena);
    reused = arena.allocate(DType::f32, {65}, "b").data;
    EXPECT_EQ(arena.used(), 3 * Arena::kAlignment);
  }
  EXPECT_EQ(arena.used(), Arena::kAlignment);
  EXPECT_EQ(arena.peak(), 3 * Arena::kAlignment);
  const Tensor c = arena.allocate(DType::f32, {1}, "c");
  EXPECT_EQ(c.data, reused);
  EXPECT_NE(c.data, a.data);
  arena.reset();
  EXPECT_EQ(arena.used(), 0);
  EXPECT_EQ(arena.peak(), 3 * Arena::kAlignment);
}

TEST(Arena, TensorsAreAlignedAndDisjoint) {
  const auto device = make_cpu_device();
  Arena arena(*device, "test", 1 << 16);
  std::vector<Tensor> tensors;
  for (int64_t count : {1, 63, 64, 65, 0, 200}) tensors.push_back(arena.allocate(DType::f32, {count}, "x"));
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(tensors[i]) << "a tensor of no elements is still a given one";
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensors[i].data) % Arena::kAlignment, 0u);
    std::memset(tensors[i].data, int(i + 1), size_t(tensors[i].bytes()));
  }
  for (size_t i = 0; i < tensors.size(); ++i)
    for (int64_t byte = 0; byte < tensors[i].bytes(); ++byte)
      ASSERT_EQ(static_cast<uint8_t*>(tensors[i].data)[byte], i + 1);
}

TEST(Arena, ExactCapacityFitsAndOneByteMoreDoesNot) {
  const auto device = make_cpu_device();
  Arena arena(*device, "saved", 512);
  arena.allocate(DType::f32, {128}, "x");
  EXPECT_EQ(arena.used(), arena.capacity());
  try {
    arena.allocate(DType::bf16, {1}, "saved: experts");
    FAIL() << "went past the plan";
  } catch (const std::logic_error& error) {
    EXPECT_NE(std::string(error.what()).find("saved: experts"), std::string::npos) << error.what();
  }
  EXPECT_EQ(arena.used(), 512) << "a refused allocation leaves the arena as it was";
}

TEST(Arena, DryPeakIsExactlyWhatTheRealRunNeeds) {
  const auto dry = make_dry_device(DeviceKind::cpu);
  Arena plan(*dry, "plan", -1);
  some_step(plan);
  EXPECT_EQ(plan.peak(), 512 + 1536 + 256);

  const auto device = make_cpu_device();
  Arena enough(*device, "real", plan.peak());
  EXPECT_NO_THROW(some_step(enough));
  EXPECT_EQ(enough.peak(), plan.peak());
  Arena short_of_it(*device, "real", plan.peak() - 1);
  EXPECT_THROW(some_step(short_of_it), std::logic_error);
}

TEST(Arena, DrySegmentsAddUpAtThePeak) {
  const auto dry = make_dry_device(DeviceKind::cuda);
  Arena plan(*dry, "plan", -1);
  some_step(plan);
  int64_t sum = 0;
  for (const auto& [name, bytes] : plan.peak_segments()) sum += bytes;
  EXPECT_EQ(sum, plan.peak());
  EXPECT_EQ(plan.peak_segments().at("kept"), 512 + 256);
  EXPECT_EQ(plan.peak_segments().at("second"), 1536);
  EXPECT_FALSE(plan.peak_segments().contains("late"));
  plan.reset();
  EXPECT_EQ(plan.used(), 0);
  some_step(plan);
  EXPECT_EQ(plan.peak(), 512 + 1536 + 256) << "a repeated step has the same peak";
}

// A dry device plans for machines larger than this one.
TEST(Arena, DryMemoryIsNotLimitedByTheHost) {
  const auto dry = make_dry_device(DeviceKind::cuda);
  Arena plan(*dry, "plan", -1);
  const Tensor huge = plan.allocate(DType::bf16, {1 << 20, 1 << 20}, "huge");
  EXPECT_TRUE(huge);
  EXPECT_EQ(plan.peak(), int64_t(2) << 40);
}

TEST(Arena, OnlyDryArenasAreUnbounded) {
  const auto device = make_cpu_device();
  EXPECT_THROW(Arena(*device, "real", -1), std::logic_error);
}

TEST(Device, CopiesToAndFromTheHost) {
  const auto device = make_cpu_device();
  EXPECT_GT(device->capacity(), 0);
  Tensor tensor(device->allocate(12), DType::i32, {3});
  const int32_t in[3] = {1, -2, 3};
  device->from_host(tensor, in);
  int32_t out[3] = {};
  device->to_host_wait(out, tensor);
  EXPECT_EQ(std::memcmp(in, out, sizeof in), 0);
  device->release(tensor.data, 12);
}

TEST(Device, RefusedMemoryIsAMemoryError) {
  const auto device = make_cpu_device();
  try {
    device->allocate(int64_t(1) << 60);
    FAIL() << "an exbibyte was granted";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kMemory);
  }
}

// Counts what is allocated; memory checkers work by allocation.
class CountingDevice final : public Device {
 public:
  DeviceKind kind() const override { return DeviceKind::cpu; }
  int64_t capacity() const override { return 0; }
  void* allocate(int64_t bytes) override {
    sizes.insert(bytes);
    return ::operator new(size_t(bytes));
  }
  void release(void* data, int64_t bytes) override {
    sizes.erase(sizes.find(bytes));
    ::operator delete(data);
  }
  void from_host(Tensor, const void*) override {}
  void to_host_wait(void*, Tensor) override {}
  std::multiset<int64_t> sizes;
};

TEST(Arena, ADebugArenaAllocatesEachTensorAlone) {
  setenv("OPTIMUS_DEBUG_ARENA", "1", 1);
  CountingDevice device;
  {
    Arena arena(device, "test", 4096);
    EXPECT_TRUE(device.sizes.empty());
    arena.allocate(DType::f32, {3}, "kept");
    {
      Arena::Scope scope(arena);
      arena.allocate(DType::bf16, {5}, "scoped");
      EXPECT_EQ(device.sizes, (std::multiset<int64_t>{10, 12}));
      EXPECT_THROW(arena.allocate(DType::f32, {4096}, "too much"), std::logic_error);
    }
    EXPECT_EQ(device.sizes, (std::multiset<int64_t>{12}));
    EXPECT_EQ(arena.used(), 256);
  }
  EXPECT_TRUE(device.sizes.empty());
  unsetenv("OPTIMUS_DEBUG_ARENA");
}

TEST(Arena, ADebugArenaCanBeFilledWithNan) {
  setenv("OPTIMUS_DEBUG_ARENA", "nan", 1);
  const auto device = make_cpu_device();
  Arena arena(*device, "test", 4096);
  unsetenv("OPTIMUS_DEBUG_ARENA");
  const Tensor x = arena.allocate(DType::f32, {5}, "x"), y = arena.allocate(DType::bf16, {3}, "y");
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(std::isnan(x.as<float>()[i]));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(static_cast<const uint16_t*>(y.data)[i], 0xFFFF);
}

}  // namespace
}  // namespace optimus::test
