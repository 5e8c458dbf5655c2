// Dispatch: the index of routed rows in one wave or many, gathering rows and combining them back.
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
  add("some masked", 40, 3, 8, [](int64_t t, int64_t k) { return (t + k) % 4 == 0 ? -1 : (t * 3 + k * 5) % 8; });
  add("all masked", 9, 2, 4, [](int64_t, int64_t) { return -1; });
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

/// Enough tokens for several threads to share them.
DispatchCase large_case() {
  DispatchCase c{"large", 6001, 3, 8, {}};
  for (int64_t slot = 0; slot < c.tokens * c.top_k; ++slot) c.ids.push_back((slot * slot + slot / 7) % 11 - 1);
  return c;
}

RouteIndex make_index(Workspace& w, int64_t tokens, int64_t groups, int64_t capacity) {
  return {w.output(DType::i32, {groups + 1}), w.output(DType::i32, {capacity}), w.output(DType::i32, {capacity}),
          w.output(DType::i32, {tokens + 1}), w.output(DType::i32, {capacity})};
}

RouteIndex make_index(Workspace& w, const DispatchCase& c, int64_t local_experts) {
  return make_index(w, c.tokens, local_experts, c.tokens * std::min(c.top_k, local_experts));
}

Indices head(const Workspace& w, const Tensor& tensor, int64_t count) { return w.read_indices(tensor.slice(0, count)); }

/// The index that a kernel made; of tensors of rows, those it has. Rows beyond must be as they were.
reference::Route read_route(const Workspace& w, const RouteIndex& index) {
  reference::Route out;
  out.offsets = w.read_indices(index.offsets_L1);
  const int64_t rows = out.offsets.back();
  out.token = head(w, index.token_R, rows);
  if (index.slot_R) out.slot = head(w, index.slot_R, rows);
  out.row_ptr = w.read_indices(index.row_ptr_T1);
  out.row = head(w, index.row_R, rows);
  for (const Tensor& tensor : {index.token_R, index.slot_R, index.row_R}) {
    if (tensor) {
      EXPECT_TRUE(w.untouched(tensor.slice(rows, tensor.elements() - rows))) << "rows past the last one";
    }
  }
  return out;
}

void expect_equal(const reference::Route& actual, const reference::Route& expected) {
  EXPECT_EQ(actual.offsets, expected.offsets);
  EXPECT_EQ(actual.token, expected.token);
  EXPECT_EQ(actual.slot, expected.slot);
  EXPECT_EQ(actual.row_ptr, expected.row_ptr);
  EXPECT_EQ(actual.row, expected.row);
}

void check_wave(Device& device, Ops& ops, const DispatchCase& c, std::pair<int64_t, int64_t> share, int64_t first_row,
                int64_t capacity) {
  SCOPED_TRACE(fmt::format("{}: experts {} to {}, wave of {} from row {}", c.name, share.first,
                           share.first + share.second, capacity, first_row));
  Workspace w(device);
  const Tensor ids_TK = w.indices({c.tokens, c.top_k}, c.ids);
  const RouteIndex index = make_index(w, c.tokens, share.second, capacity);
  w.run([&] { ops.route(ids_TK, share.first, first_row, index); });
  const auto all = reference::route(c.ids, c.top_k, share.first, share.second);
  expect_equal(read_route(w, index), reference::wave(all, first_row, capacity));
}

TEST_P(DispatchTest, IndexMatchesReference) {
  for (const DispatchCase& c : cases())
    for (const auto& share : shares_of(c))
      check_wave(device(), ops(), c, share, 0, c.tokens * std::min(c.top_k, share.second));
  check_wave(device(), ops(), large_case(), {0, 8}, 0, 3 * 6001);
  check_wave(device(), ops(), large_case(), {2, 4}, 0, 3 * 6001);
}

// Of every length, from every kind of beginning: the first row, inside an expert, the last row, behind it.
TEST_P(DispatchTest, WaveMatchesReference) {
  for (const DispatchCase& c : cases())
    for (const auto& share : shares_of(c)) {
      const int64_t rows = reference::route(c.ids, c.top_k, share.first, share.second).offsets.back();
      for (int64_t capacity : {int64_t{0}, int64_t{1}, int64_t{7}, rows / 2 + 1, rows, rows + 5})
        for (int64_t first_row : {int64_t{0}, int64_t{3}, rows / 2, rows - 1, rows, rows + 1, int64_t{1} << 40})
          if (first_row >= 0) check_wave(device(), ops(), c, share, first_row, capacity);
    }
  for (int64_t first_row : {1, 5000, 12000, 20000}) check_wave(device(), ops(), large_case(), {1, 6}, first_row, 5000);
}

struct Wave {
  int64_t first_row;
  reference::Route route;
};

/// What the kernel makes of waves of one capacity, and of `beyond` more behind the last row.
std::vector<Wave> waves_of(Device& device, Ops& ops, const DispatchCase& c, int64_t capacity, int64_t beyond) {
  const int64_t rows = reference::route(c.ids, c.top_k, 0, c.experts).offsets.back();
  std::vector<Wave> out;
  for (int64_t first_row = 0; first_row < rows + beyond * capacity; first_row += capacity) {
    Workspace w(device);
    const Tensor ids_TK = w.indices({c.tokens, c.top_k}, c.ids);
    const RouteIndex index = make_index(w, c.tokens, c.experts, capacity);
    w.run([&] { ops.route(ids_TK, 0, first_row, index); });
    out.push_back({first_row, read_route(w, index)});
  }
  return out;
}

// One after the other, waves give the rows of a single wave, and every (token, k) pair with an expert once.
TEST_P(DispatchTest, WavesEnumerateEveryPairOnceAndInOrder) {
  for (const DispatchCase& c : cases()) {
    if (c.tokens > 100) continue;
    const int64_t pairs = c.tokens * c.top_k;
    const reference::Route whole = waves_of(device(), ops(), c, pairs + 1, 1)[0].route;
    for (int64_t capacity : {int64_t{1}, int64_t{2}, int64_t{13}, pairs / 2 + 1, pairs + 100}) {
      SCOPED_TRACE(fmt::format("{}: waves of {}", c.name, capacity));
      Indices tokens, slots, counts(size_t(c.experts));
      std::vector<Indices> rows_of(size_t(c.tokens), Indices{});
      for (const auto& [first_row, route] : waves_of(device(), ops(), c, capacity, 2)) {
        tokens.insert(tokens.end(), route.token.begin(), route.token.end());
        slots.insert(slots.end(), route.slot.begin(), route.slot.end());
        for (size_t e = 0; e < counts.size(); ++e) counts[e] += route.offsets[e + 1] - route.offsets[e];
        for (size_t t = 0; t < rows_of.size(); ++t)
          for (int64_t entry = route.row_ptr[t]; entry < route.row_ptr[t + 1]; ++entry)
            rows_of[t].push_back(first_row + route.row[size_t(entry)]);
      }
      EXPECT_EQ(tokens, whole.token);
      EXPECT_EQ(slots, whole.slot);
      for (size_t e = 0; e < counts.size(); ++e) EXPECT_EQ(counts[e], whole.offsets[e + 1] - whole.offsets[e]);
      for (size_t t = 0; t < rows_of.size(); ++t) {  // the waves sort a token's rows by expert, a single one by k
        Indices listed(whole.row.begin() + whole.row_ptr[t], whole.row.begin() + whole.row_ptr[t + 1]);
        std::sort(listed.begin(), listed.end());
        std::sort(rows_of[t].begin(), rows_of[t].end());
        EXPECT_EQ(rows_of[t], listed) << "rows of token " << t;
      }
      Indices named;
      for (int64_t slot = 0; slot < pairs; ++slot)
        if (c.ids[size_t(slot)] >= 0) named.push_back(slot);
      std::sort(slots.begin(), slots.end());
      EXPECT_EQ(slots, named);
    }
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
    w.run([&] { ops().route(ids_TK, part * 2, 0, index); });
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

// The sum over all waves, each added to what the ones before it left, is the sum of a single wave; exactly, as all
// values are small integers.
TEST_P(DispatchTest, CombiningWavesGivesTheWholeSum) {
  const int64_t hidden = 5;
  const auto integers = [](int64_t count, int64_t step) {
    Values out;
    for (int64_t i = 0; i < count; ++i) out.push_back(double(i * step % 15 - 7));
    return out;
  };
  for (const DispatchCase& c : cases())
    for (DType type : {DType::f32, DType::bf16}) {
      if (c.tokens > 100) continue;
      const auto whole = reference::route(c.ids, c.top_k, 0, c.experts);
      const int64_t rows = whole.offsets.back();
      for (int64_t capacity : {int64_t{1}, int64_t{6}, rows + 3}) {
        SCOPED_TRACE(fmt::format("{} {}: waves of {}", c.name, name_of(type), capacity));
        Workspace w(device());
        const Tensor ids_TK = w.indices({c.tokens, c.top_k}, c.ids);
        const RouteIndex index = make_index(w, c.tokens, c.experts, capacity);
        Values row_values = integers(rows * hidden, 4);
        row_values.resize(size_t((rows + 2 * capacity) * hidden), NAN);
        const Tensor expert_rows = w.input(type, {rows + 2 * capacity, hidden}, row_values);
        const Tensor y = w.in_out(type, {c.tokens, hidden}, integers(c.tokens * hidden, 11));
        const Values expected =
            reference::sum(w.read(y), reference::combine_rows(w.read(expert_rows.slice(0, rows)), whole, hidden));
        w.run([&] {
          for (int64_t first_row = 0; first_row <= rows + capacity; first_row += capacity) {
            ops().route(ids_TK, 0, first_row, index);
            ops().combine_rows(expert_rows.slice(first_row, capacity), index, y, y);
          }
        });
        EXPECT_EQ(w.read(y), expected);
      }
    }
}

// In place, a token without rows is passed over, which -0 + 0 = +0 would show.
TEST_P(DispatchTest, CombineInPlaceLeavesTokensWithoutRowsAlone) {
  for (DType type : {DType::f32, DType::bf16}) {
    Workspace w(device());
    const auto route = reference::route({0, -1, 1, -1}, 1, 0, 2);
    const RouteIndex index = upload(w, route, 2);
    const Tensor rows = w.input(type, {2, 1}, {5, 6}), y = w.in_out(type, {4, 1}, {1, -0.0, 2, -0.0});
    w.run([&] { ops().combine_rows(rows, index, y, y); });
    const Values combined = w.read(y);
    EXPECT_EQ(combined, (Values{6, 0, 8, 0}));
    EXPECT_TRUE(std::signbit(combined[1]) && std::signbit(combined[3]));
  }
}

TEST_P(DispatchTest, GatherOfIndices) {
  for (const DispatchCase& c : cases())
    for (Layout layout : {Layout::contiguous, Layout::pitched}) {
      SCOPED_TRACE(c.name);
      Workspace w(device());
      const auto route = reference::route(c.ids, c.top_k, 0, c.experts);
      const int64_t rows = route.offsets.back(), spare = 3;
      const RouteIndex index = upload(w, route, rows + spare);
      Values values = to_values(c.ids);
      for (size_t i = 0; i < values.size(); ++i) values[i] += double(i) + 0x7f000000;  // no f32 holds them
      const Tensor x = w.input(DType::i32, {c.tokens, c.top_k}, values, layout);
      const Tensor gathered = w.output(DType::i32, {rows + spare, c.top_k}, layout);
      w.run([&] { ops().gather_rows(x, index, gathered); });
      EXPECT_EQ(w.read(gathered.slice(0, rows)), reference::gather_rows(values, route, c.top_k));
      EXPECT_TRUE(w.untouched(gathered.slice(rows, spare))) << "rows past the last expert's";
    }
}

void check_route_to_ranks(Device& device, Ops& ops, const DispatchCase& c, int64_t experts_per_rank, int64_t ranks) {
  SCOPED_TRACE(fmt::format("{}: {} ranks of {} experts", c.name, ranks, experts_per_rank));
  Workspace w(device);
  const Tensor ids_TK = w.indices({c.tokens, c.top_k}, c.ids);
  RouteIndex index = make_index(w, c.tokens, ranks, c.tokens * std::min(c.top_k, ranks));
  index.slot_R = {};
  w.run([&] { ops.route_to_ranks(ids_TK, experts_per_rank, index); });
  expect_equal(read_route(w, index), reference::route_to_ranks(c.ids, c.top_k, experts_per_rank, ranks));
}

TEST_P(DispatchTest, RanksMatchReference) {
  for (const DispatchCase& c : cases())
    for (int64_t ranks = 1; ranks <= std::min<int64_t>(c.experts, 9); ++ranks)
      check_route_to_ranks(device(), ops(), c, c.experts / ranks, ranks);  // the last experts have no rank at times
  check_route_to_ranks(device(), ops(), large_case(), 2, 4);
}

// A token is sent once to each rank that has one of its experts; a rank gets its tokens in ascending order, and the
// token's list leads to those rows.
TEST_P(DispatchTest, RanksGetTheirTokensOnce) {
  for (const DispatchCase& c : cases())
    for (int64_t ranks : {1, 2, 4}) {
      if (c.experts % ranks != 0) continue;
      SCOPED_TRACE(fmt::format("{}: {} ranks", c.name, ranks));
      const int64_t each = c.experts / ranks;
      Workspace w(device());
      const Tensor ids_TK = w.indices({c.tokens, c.top_k}, c.ids);
      const RouteIndex index = make_index(w, c.tokens, ranks, c.tokens * std::min(c.top_k, ranks));
      w.run([&] { ops().route_to_ranks(ids_TK, each, index); });
      EXPECT_TRUE(w.untouched(index.slot_R));
      const Indices offsets = w.read_indices(index.offsets_L1), token = w.read_indices(index.token_R),
                    row_ptr = w.read_indices(index.row_ptr_T1), row = w.read_indices(index.row_R);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const Indices sent(token.begin() + offsets[size_t(rank)], token.begin() + offsets[size_t(rank) + 1]);
        Indices wanted;
        for (int64_t t = 0; t < c.tokens; ++t) {
          const auto first = c.ids.begin() + t * c.top_k;
          if (std::any_of(first, first + c.top_k, [&](int64_t id) { return id >= 0 && id / each == rank; }))
            wanted.push_back(t);
        }
        EXPECT_EQ(sent, wanted) << "rank " << rank;
      }
      Indices listed;
      for (int64_t t = 0; t < c.tokens; ++t)
        for (int64_t entry = row_ptr[size_t(t)]; entry < row_ptr[size_t(t) + 1]; ++entry) {
          listed.push_back(row[size_t(entry)]);
          EXPECT_EQ(token[size_t(listed.back())], t);
        }
      std::sort(listed.begin(), listed.end());
      Indices all(size_t(offsets.back()));
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(listed, all);
    }
}

// Buffers without a single row, with and without tokens.
TEST_P(DispatchTest, NoRows) {
  const int64_t hidden = 4;
  for (int64_t tokens : {0, 3}) {
    SCOPED_TRACE(fmt::format("{} tokens", tokens));
    Workspace w(device());
    const Tensor ids_TK = w.indices({tokens, 2}, Indices(size_t(2 * tokens), -1));
    const RouteIndex index = make_index(w, tokens, 3, 0);
    const Values values = normal_values(tokens * hidden, 1);
    const Tensor x = w.input(DType::f32, {tokens, hidden}, values), rows = w.output(DType::f32, {0, hidden});
    const Tensor kept = w.in_out(DType::f32, x.shape, values), sum = w.output(DType::f32, x.shape),
                 zero = w.output(DType::f32, x.shape);
    w.run([&] {
      ops().route(ids_TK, 0, 0, index);
      ops().gather_rows(x, index, rows);
      ops().combine_rows(rows, index, kept, kept);
      ops().combine_rows(rows, index, x, sum);
      ops().combine_rows(rows, index, {}, zero);
    });
    EXPECT_EQ(w.read_indices(index.offsets_L1), (Indices{0, 0, 0, 0}));
    EXPECT_EQ(w.read_indices(index.row_ptr_T1), Indices(size_t(tokens + 1), 0));
    EXPECT_EQ(w.read(kept), w.read(x));
    EXPECT_EQ(w.read(sum), w.read(x));
    EXPECT_EQ(w.read(zero), Values(values.size(), 0.0));
  }
}

TEST_P(DispatchTest, TooFewRowsForRanksAreABug) {
  Workspace w(device());
  const Tensor ids_TK = w.indices({3, 2}, {0, 1, 0, 1, 0, 1});
  EXPECT_THROW(ops().route_to_ranks(ids_TK, 1, make_index(w, 3, 2, 5)), std::logic_error);
  EXPECT_THROW(ops().route(ids_TK, 0, -1, make_index(w, 3, 2, 6)), std::logic_error);
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
