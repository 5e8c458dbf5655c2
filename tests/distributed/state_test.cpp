// State over many ranks: checkpoints that any layout reads, faults of one rank that stop all, memory within the plan,
// evaluation, data.
#include <cstring>

#include "distributed/layouts.h"
#include "optimus/base/json.h"
#include "optimus/checkpoint/checkpoint.h"
#include "optimus/comm/together.h"
#include "optimus/train/evaluation.h"
#include "optimus/train/run_state.h"
#include "support/temporary_folder.h"

namespace optimus::test {
namespace {

/// A folder that all ranks know; the first one owns it.
class SharedFolder {
 public:
  SharedFolder() {
    if (processes().rank() == 0) owner_.emplace();
    path_ = processes().broadcast(owner_ ? owner_->path().string() : "", 0);
  }
  ~SharedFolder() { processes().barrier(); }
  fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::optional<testing::TemporaryFolder> owner_;
  fs::path path_;
};

/// Layouts that differ as much as the ranks allow.
std::vector<Layout> different_layouts() {
  const int ranks = processes().size();
  std::vector<Layout> layouts{{1, 1, ranks, "auto", "ep_aware", "1f1b", 1},
                              {1, ranks, ranks, "allgather", "none", "1f1b", 1},
                              {ranks, 1, 1, "auto", "dp", "gpipe", 1}};
  if (ranks >= 4) layouts.push_back({2, 2, ranks / 2, "alltoall", "dp", "zero_bubble", 1});
  if (ranks >= 4) layouts.push_back({2, ranks / 4, ranks / 2, "alltoall", "ep_aware", "interleaved", 2});
  return layouts;
}

std::map<std::string, std::vector<float>> whole_tensors(const fs::path& folder) {
  Checkpoint checkpoint(folder);
  EXPECT_TRUE(checkpoint.damages(Checkpoint::Check::kContents).empty());
  std::map<std::string, std::vector<float>> tensors;
  for (const auto& [name, record] : checkpoint.manifest().tensors) {
    std::vector<float>& values = tensors[name];
    values.resize(size_t(record.global.elements()));
    checkpoint.read({name, DType::f32, record.global, whole(record.global)}, std::as_writable_bytes(std::span(values)));
  }
  return tensors;
}

void save(LayoutRun& run, const fs::path& folder, int64_t step) {
  save_state(*run.engine, folder, step, section_to_json(run.config), {}, processes());
}

class Resharding : public ::testing::TestWithParam<const char*> {};

TEST_P(Resharding, ACheckpointDescribesTheModelNotTheLayout) {
  const SharedFolder folder;
  const std::vector<std::string> precision{fmt::format("precision.compute={}", GetParam())};
  const Variant& variant = variant_named("TiedModelBalance");
  int number = 0;
  for (const Layout& from : different_layouts()) {
    LayoutRun writer(variant, from, precision);
    for (int64_t step = 0; step < 2; ++step) writer.engine->step(step, writer.batch(step));
    const fs::path written = folder / fmt::format("{}", number++);
    save(writer, written, 2);
    for (const Layout& to : different_layouts()) {
      SCOPED_TRACE(from.text() + " to " + to.text());
      LayoutRun reader(variant, to, precision);
      Checkpoint checkpoint(written);
      load_state(*reader.engine, checkpoint, processes());
      expect_replicas_equal(reader);
      const fs::path again = folder / fmt::format("{}", number++);
      save(reader, again, 2);
      if (processes().rank() == 0) {
        const auto before = whole_tensors(written), after = whole_tensors(again);
        EXPECT_EQ(before.size(), 3 * reference_of(variant, "sequence").weights.size());
        EXPECT_TRUE(before == after) << "the gathered tensors differ";
      }
      // It goes on as one rank would have.
      if (std::string(GetParam()) == "f32") {
        for (int64_t step = 2; step < 5; ++step) reader.engine->step(step, reader.batch(step));
        expect_state_after(*reader.engine, *reader.device, reference_of(variant, "sequence"));
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(All, Resharding, ::testing::Values("f32", "bf16"),
                         [](const auto& info) { return std::string(info.param); });

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// One weight of a layer's attention; if possible one that other ranks update and send here.
Tensor weight_of_another_owner(const Engine& engine) {
  std::vector<bool> held(size_t(engine.table().elements()));
  for (const FlatRange& range : engine.master_weights().held)
    std::fill_n(held.begin() + range.begin, range.count, true);
  int64_t found = -1;
  for (const Parameter& row : engine.table().rows()) {
    if (!row.name.ends_with("attention.qkv.weight") && !row.name.ends_with("attention.output.weight")) continue;
    if (found < 0) found = row.offset;
    for (int64_t i = row.offset; i < row.offset + row.local.elements(); ++i)
      if (!held[size_t(i)]) return engine.weights().slice(i, 1);
  }
  return engine.weights().slice(found, 1);
}

std::vector<float> all_of(LayoutRun& run, Tensor flat) { return read_floats_wait(*run.device, flat); }

TEST(Faults, ANumberThatIsNotFiniteStopsAllRanksBeforeAnyWeightChanges) {
  for (const Layout& layout : different_layouts())
    for (int bad = 0; bad < processes().size(); ++bad)
      for (const float poison : {NAN, INFINITY}) {
        SCOPED_TRACE(fmt::format("{}, {} on rank {}", layout.text(), poison, bad));
        LayoutRun run(variant_named("Moe"), layout);
        run.engine->step(0, run.batch(0));
        run.engine->result_wait();
        run.engine->weights_wait();
        if (processes().rank() == bad) run.device->from_host(weight_of_another_owner(*run.engine), &poison);
        const std::vector<float> moments = all_of(run, run.engine->moments()[0].buffer);
        const std::vector<float> weights = all_of(run, run.engine->weights());
        run.engine->step(1, run.batch(1));
        EXPECT_FALSE(run.engine->result_wait().finite);
        run.engine->weights_wait();
        EXPECT_TRUE(same_bits(all_of(run, run.engine->moments()[0].buffer), moments));
        // The gathering of unchanged weights may replace the poisoned replica by a sound one, never the reverse.
        if (processes().rank() != bad) {
          EXPECT_TRUE(same_bits(all_of(run, run.engine->weights()), weights));
        }
      }
}

TEST(Faults, AnErrorOfOneRankIsThrownOnAll) {
  const int last = processes().size() - 1;
  try {
    together(processes(), [&] {
      if (processes().rank() == last) fail(ErrorKind::kData, "the file of rank {}", last);
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kData);
    EXPECT_EQ(std::string(error.what()), fmt::format("the file of rank {}", last));
  }
  together(processes(), [] {});
}

TEST(Memory, StaysWithinThePlanInEveryLayout) {
  for (const char* name : {"Moe", "AllTokensToOneRank", "TiedModelBalance"})
    for (const Layout& layout : covering(layouts_for(variant_named(name), processes().size()))) {
      SCOPED_TRACE(std::string(name) + " " + layout.text());
      LayoutRun run(variant_named(name), layout);
      const EnginePlan plan = plan_engine(run.config, EngineUse::train, processes().rank());
      for (int64_t step = 0; step < 2; ++step) run.engine->step(step, run.batch(step));
      // The arenas would not give more than was planned. With static shapes the plan is exact.
      const int64_t planned = plan.memory.total();
      if (layout.dispatcher == "allgather" || layout.ep == 1) {
        run.engine->evaluate_wait(part_of(run.batch(9), 0, 1));
        EXPECT_EQ(run.engine->peak_bytes(), planned);
      }
    }
}

TEST(Evaluation, IsTheSameInEveryLayout) {
  const SharedFolder folder;
  if (processes().rank() == 0) {
    // 11 windows of 12 tokens: no number of ranks divides them.
    std::string bytes;
    for (int i = 0; i < 11 * 12 + 5; ++i) bytes += {char(i * 7 % 40), 0};
    testing::write_bytes(folder / "valid.bin", bytes);
  }
  processes().barrier();
  const std::vector<std::string> data{fmt::format("data.valid=[\"{}\"]", (folder / "valid.bin").string()),
                                      "data.format=raw_u16"};
  std::optional<double> expected;
  for (const Layout& layout : different_layouts()) {
    SCOPED_TRACE(layout.text());
    LayoutRun run(variant_named("Moe"), layout, data);
    run.engine->step(0, run.batch(0));
    const EvalWindows windows(run.config.data, 12, 40, 0);
    ASSERT_EQ(windows.windows(), 11);
    const Evaluation evaluation =
        evaluate_windows_wait(*run.engine, windows, run.config.train.micro_batch, processes());
    EXPECT_EQ(evaluation.weight, 11 * 11);
    if (!expected) expected = evaluation.loss;
    EXPECT_NEAR(evaluation.loss, *expected, 1e-5 * *expected);
  }
}

TEST(Data, TheRanksOfAGroupReadTheGlobalBatchInOrder) {
  const SharedFolder folder;
  if (processes().rank() == 0) {
    std::string bytes;
    for (int i = 0; i < 40 * 12; ++i) bytes += {char(i * 11 % 40), char(0)};
    testing::write_bytes(folder / "train.bin", bytes);
  }
  processes().barrier();
  DataConfig data;
  data.train = {{(folder / "train.bin").string(), {}}};
  data.format = "raw_u16";
  Loader whole(data, {12, 40, 8, 0, 8}, 3);
  for (const Layout& layout : different_layouts()) {
    const MeshPlace place = place_of(make_mesh_shape(processes().size(), layout.pp, layout.ep), processes().rank());
    const int64_t local = 8 / layout.dp;
    Loader mine(data, {12, 40, 8, place.dp * local, local}, 3);
    for (int64_t step : {0, 1, 7}) {
      const HostBatch expected = part_of(whole.batch(step), place.dp * local, local), got = mine.batch(step);
      EXPECT_EQ(got.tokens, expected.tokens);
      EXPECT_EQ(got.targets, expected.targets);
      EXPECT_EQ(got.weights, expected.weights);
    }
  }
}

TEST(Precision, Bf16ReplicasStayEqualAndFollowOneRank) {
  const Variant& variant = variant_named("Moe");
  for (const Layout& layout : different_layouts()) {
    SCOPED_TRACE(layout.text());
    LayoutRun run(variant, layout, {"precision.compute=bf16", "precision.gradients=bf16"});
    for (int64_t step = 0; step < 3; ++step) {
      run.engine->step(step, run.batch(step));
      EXPECT_NEAR(run.engine->result_wait().loss, reference_of(variant, "sequence").results[size_t(step)].loss, 0.05);
      run.engine->weights_wait();
      expect_replicas_equal(run);
    }
  }
}

// Where two replicas are summed there is one order only, so who updates what cannot change a bit.
TEST(Sharding, SumsOfTwoGiveTheSameBits) {
  const int pp = processes().size() / 2;
  if (processes().size() != 2 && processes().size() != 4) GTEST_SKIP() << "for two ranks that replicate";
  const Variant& variant = variant_named("Moe");
  for (int ep : {1, 2})
    for (const char* precision : {"f32", "bf16"}) {
      std::vector<float> expected;
      for (const char* sharding : {"dp", "ep_aware", "none"}) {
        SCOPED_TRACE(fmt::format("ep {} {} {}", ep, precision, sharding));
        LayoutRun run(variant, {pp, ep, 2, "allgather", sharding, "1f1b", 1, "sequence"},
                      {fmt::format("precision.compute={}", precision)});
        for (int64_t step = 0; step < 4; ++step) run.engine->step(step, run.batch(step));
        EXPECT_TRUE(run.engine->result_wait().finite);
        run.engine->weights_wait();
        const std::vector<float> weights = all_of(run, run.engine->weights());
        if (expected.empty()) expected = weights;
        EXPECT_TRUE(same_bits(weights, expected));
      }
    }
}

}  // namespace
}  // namespace optimus::test
