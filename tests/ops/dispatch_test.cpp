// Dispatch: the index of routed rows, gathering them and combining them back.
#include <numeric>

#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using DispatchTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(DispatchTest);

struct DispatchCase {
  std::string name;
  int64_t tokens, top_k, experts;
  Indices ids;
};

std::vector<DispatchCase> cases() {
  std::vector<DispatchCase> out;
  const auto add = [&](std::string name, int64_t tokens, int64_t top_k, int64_t experts, auto&& expert_of) {
    Indices ids;
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t k = 0; k < top_k; ++k) ids.push_back(expert_of(t, k));
    out.push_back({std::move(name), tokens, top_k, experts, ids});
  };
  add("one token", 1, 1, 1, [](int64_t, int64_t) { return 0; });
  add("no tokens", 0, 2, 4, [](int64_t, int64_t) { return 0; });
  add("spread", 37, 3, 8, [](int64_t t, int64_t k) { return (t * 5 + k * 3) % 8; });
  add("descending experts", 13, 4, 4, [](int64_t, int64_t k) { return 3 - k; });
  add("all to the first", 29, 1, 6, [](int64_t, int64_t) { return 0; });
  add("all to the last", 29, 1, 6, [](int64_t, int64_t) { return 5; });
  add("all but one empty", 21, 2, 9, [](int64_t, int64_t k) { return 4 + k; });
  add("many tokens", 1000, 3, 8, [](int64_t t, int64_t k) { return (t * t + k * 3) % 8; });
  add("many experts", 50, 6, 160, [](int64_t t, int64_t k) { return (t * 31 + k * 26) % 160; });
  return out;
}

/// Every share of experts that some rank of an expert-parallel group may hold.
std::vector<std::pair<int64_t, int64_t>> shares_of(const DispatchCase& c) {
  std::vector<std::pair<int64_t, int64_t>> out;
  for (int64_t parts : {1, 2, 4})
    if (c.experts % parts == 0)
      for (int64_t part = 0; part < parts; ++part) out.push_back({part * c.experts / parts, c.experts / parts});
  if (c.experts > 2) out.push_back({1, c.experts - 2});
  return out;
}

RouteIndex make_index(Workspace& w, const DispatchCase& c, int64_t local_experts) {
  const int64_t capacity = c.tokens * std::min(c.top_k, local_experts);
  return {w.output(DType::i32, {local_experts + 1}), w.output(DType::i32, {capacity}), w.output(DType::i32, {capacity}),
          w.output(DType::i32, {c.tokens + 1}), w.output(DType::i32, {capacity})};
}

Indices head(const Workspace& w, const Tensor& tensor, int64_t count) { return w.read_indices(tensor.slice(0, count)); }

TEST_P(DispatchTest, IndexMatchesReference) {
  for (const DispatchCase& c : cases())
    for (const auto& [first, local] : shares_of(c)) {
      SCOPED_TRACE(fmt::format("{}: experts {} to {}", c.name, first, first + local));
      Workspace w(device());
      const Tensor ids_TK = w.indices({c.tokens, c.top_k}, c.ids);
      const RouteIndex index = make_index(w, c, local);
      w.run([&, first = first] { ops().route(ids_TK, first, index); });
      const auto expected = reference::route(c.ids, c.top_k, first, local);
      ASSERT_EQ(w.read_indices(index.offsets_L1), expected.offsets);
      const int64_t rows = expected.offsets.back();
      EXPECT_EQ(head(w, index.token_R, rows), expected.token);
      EXPECT_EQ(head(w, index.slot_R, rows), expected.slot);
      EXPECT_EQ(w.read_indices(index.row_ptr_T1), expected.row_ptr);
      EXPECT_EQ(head(w, index.row_R, rows), expected.row);
    }
}

// Over the ranks of an expert-parallel group every (token, k) pair appears exactly once.
TEST_P(DispatchTest, SharesPartitionThePairs) {
  const DispatchCase c = cases()[2];
  Indices seen;
  for (int64_t part = 0; part < 4; ++part) {
    Workspace w(device());
    const Tensor ids_TK = w.indices({c.tokens, c.top_k}, c.ids);
    const RouteIndex index = make_index(w, c, 2);
    w.run([&] { ops().route(ids_TK, part * 2, index); });
    const Indices slots = head(w, index.slot_R, w.read_indices(index.offsets_L1).back());
    seen.insert(seen.end(), slots.begin(), slots.end());
  }
  std::sort(seen.begin(), seen.end());
  Indices all(size_t(c.tokens * c.top_k));
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(seen, all);
}

/// The reference's index on the device, with spare rows.
RouteIndex upload(Workspace& w, reference::Route route, int64_t capacity) {
  const auto spare = [&](Indices values) {
    values.resize(size_t(capacity), -1);
    return w.indices({capacity}, values);
  };
  return {w.indices({int64_t(route.offsets.size())}, route.offsets), spare(route.token), spare(route.slot),
          w.indices({int64_t(route.row_ptr.size())}, route.row_ptr), spare(route.row)};
}

enum class Addend { none, same, other };

TEST_P(DispatchTest, GatherAndCombine) {
  const int64_t hidden = 19, spare = 3;
  for (const DispatchCase& c : cases())
    for (const auto& [first, local] : shares_of(c))
      for (DType type : {DType::f32, DType::bf16})
        for (Layout layout : {Layout::contiguous, Layout::pitched})
          for (Addend kind : {Addend::none, Addend::same, Addend::other}) {
            SCOPED_TRACE(fmt::format("{}: experts {} to {} {} addend {}", c.name, first, first + local, name_of(type),
                                     int(kind)));
            Workspace w(device());
            const auto route = reference::route(c.ids, c.top_k, first, local);
            const int64_t rows = route.offsets.back(), capacity = rows + spare;
            const RouteIndex index = upload(w, route, capacity);
            const Shape shape{c.tokens, hidden};
            const Tensor x = w.input(type, shape, normal_values(shape.elements(), 1), layout);
            const Tensor gathered = w.output(type, {capacity, hidden}, layout);
            Values row_values = normal_values(rows * hidden, 2);
            row_values.resize(size_t(capacity * hidden), NAN);
            const Tensor expert_rows = w.input(type, {capacity, hidden}, row_values, layout);
            const Values before = normal_values(shape.elements(), 3);
            Tensor y, addend;
            if (kind == Addend::same) y = addend = w.in_out(type, shape, before, layout);
            else y = w.output(type, shape, layout);
            if (kind == Addend::other) addend = w.input(type, shape, before, layout);

            Values combined = reference::combine_rows(w.read(expert_rows), route, hidden);
            if (addend) combined = reference::sum(combined, w.read(addend));
            w.run([&] {
              ops().gather_rows(x, index, gathered);
              ops().combine_rows(expert_rows, index, addend, y);
            });
            EXPECT_EQ(w.read(gathered.slice(0, rows)), reference::gather_rows(w.read(x), route, hidden));
            EXPECT_TRUE(w.untouched(gathered.slice(rows, spare))) << "rows past the last expert's";
            EXPECT_TRUE(close(w.read(y), combined, tolerance_of(type))) << "combined";
          }
}

// <gather(x), r> = <x, combine(r)>: each is the other's gradient.
TEST_P(DispatchTest, GatherAndCombineAreAdjoint) {
  const int64_t hidden = 8;
  const DispatchCase c = cases()[2];
  Workspace w(device());
  const auto route = reference::route(c.ids, c.top_k, 2, 4);
  const int64_t rows = route.offsets.back();
  const RouteIndex index = upload(w, route, rows);
  const Tensor x = w.input(DType::f32, {c.tokens, hidden}, normal_values(c.tokens * hidden, 1));
  const Tensor r = w.input(DType::f32, {rows, hidden}, normal_values(rows * hidden, 2));
  const Tensor gathered = w.output(DType::f32, r.shape), combined = w.output(DType::f32, x.shape);
  w.run([&] {
    ops().gather_rows(x, index, gathered);
    ops().combine_rows(r, index, {}, combined);
  });
  const double one = reference::dot(w.read(gathered), w.read(r)), two = reference::dot(w.read(x), w.read(combined));
  EXPECT_NEAR(one, two, 1e-5 * std::abs(one));
}

}  // namespace
}  // namespace optimus::test
