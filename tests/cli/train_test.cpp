// optimus train as its users meet it: real processes that are stopped, killed, given bad input and full disks.
#include <fstream>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "optimus/checkpoint/run_folder.h"
#include "optimus/tensor/device.h"
#include "support/program.h"
#include "support/temporary_folder.h"

namespace optimus::test {
namespace {

using testing::TemporaryFolder;

constexpr const char* kConfig = R"(
[model]
layers = 2
hidden = 32
heads = 2
vocab = 64
sequence = 16
[model.moe]
experts = 4
top_k = 2
width = 16
balance_unit = "global"
[data]
train = ["{0}/train.npy"]
valid = ["{0}/valid.npy"]
[train]
steps = {1}
global_batch = 4
micro_batch = 2
log_every = 1
eval_every = 10
[checkpoint]
every = 7
[run]
dir = "{0}/run"
)";

void write_npy(const fs::path& path, int64_t tokens, int32_t below, uint32_t seed) {
  std::string header = fmt::format("{{'descr': '<u2', 'fortran_order': False, 'shape': ({},), }}", tokens);
  header.resize(118, ' ');
  std::string bytes = std::string("\x93NUMPY\x01\x00\x76\x00", 10) + header;
  std::mt19937 generator(seed);
  for (int64_t i = 0; i < tokens; ++i) {
    const uint16_t token = uint16_t(generator() % uint32_t(below));
    bytes.append(reinterpret_cast<const char*>(&token), 2);
  }
  testing::write_bytes(path, bytes);
}

/// A folder with data and a configuration of `steps` steps.
class TrainingRun {
 public:
  explicit TrainingRun(int64_t steps = 40) {
    write_npy(path() / "train.npy", 16 * 300 + 5, 64, 1);
    write_npy(path() / "valid.npy", 16 * 6, 64, 2);
    testing::write_bytes(path() / "run.toml", fmt::format(fmt::runtime(kConfig), path().string(), steps));
  }
  const fs::path& path() const { return folder_.path(); }
  fs::path dir() const { return path() / "run"; }

  std::vector<std::string> arguments(const std::vector<std::string>& overrides = {}) const {
    std::vector<std::string> out{"train", (path() / "run.toml").string()};
    for (const std::string& text : overrides) out.insert(out.end(), {"--set", text});
    return out;
  }
  ProgramResult train(const std::vector<std::string>& overrides = {}, const ProgramLimits& limits = {}) const {
    return run_program(OPTIMUS_BINARY, arguments(overrides), limits);
  }
  void wait_for_steps(int64_t steps) const {
    for (int i = 0; i < 3000; ++i) {
      if (int64_t(losses().size()) >= steps) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    FAIL() << "training did not reach step " << steps;
  }

  /// Every value of metrics.jsonl that does not tell the time.
  std::vector<nlohmann::json> losses() const {
    std::vector<nlohmann::json> out;
    std::ifstream file(dir() / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      nlohmann::json record = nlohmann::json::parse(line, nullptr, false);
      if (record.is_discarded()) continue;
      for (const char* key : {"step_seconds", "tokens_per_second", "tflops", "mfu"}) record.erase(key);
      out.push_back(std::move(record));
    }
    return out;
  }
  std::string bytes(int64_t step, const char* file) const { return read_text(step_folder(dir(), step) / file); }

 private:
  TemporaryFolder folder_;
};

void expect_same_end(const TrainingRun& run, const TrainingRun& undisturbed, int64_t steps) {
  EXPECT_EQ(run.losses(), undisturbed.losses());
  for (const char* file : {"weights.safetensors", "m.safetensors", "v.safetensors", "router.safetensors"})
    EXPECT_EQ(run.bytes(steps, file), undisturbed.bytes(steps, file)) << file;
}

TEST(Train, WritesWhatItPromises) {
  TrainingRun run(20);
  const ProgramResult result = run.train();
  ASSERT_EQ(result.code, 0) << result.err;
  const auto records = run.losses();
  ASSERT_EQ(records.size(), 20u);
  const std::string written = read_text(run.dir() / "metrics.jsonl");
  const nlohmann::json first = nlohmann::json::parse(written.substr(0, written.find('\n')));
  for (const char* key : {"step", "tokens", "loss", "ce", "balance_loss", "z_loss", "grad_norm", "lr", "step_seconds",
                          "tokens_per_second", "tflops", "mfu", "memory_peak_bytes", "router"})
    EXPECT_TRUE(first.contains(key)) << key;
  EXPECT_EQ(records[0]["step"], 1);
  EXPECT_TRUE(records[9].contains("valid_loss"));
  EXPECT_FALSE(records[8].contains("valid_loss"));
  EXPECT_TRUE(fs::exists(run.dir() / "config.toml"));
  EXPECT_EQ(step_folders(run.dir()).size(), 2u) << "keep = 2";
  for (const auto& record : records) EXPECT_EQ(record["memory_peak_bytes"], records[4]["memory_peak_bytes"]);

  const auto before = records;
  EXPECT_EQ(run.train().code, 0) << "a finished run is done";
  EXPECT_EQ(run.losses(), before);
}

TEST(Train, ResolvedConfigurationMeansTheSame) {
  TrainingRun run(8), again(8);
  ASSERT_EQ(run.train().code, 0);
  const std::string resolved = read_text(run.dir() / "config.toml");
  testing::write_bytes(again.path() / "run.toml", resolved);
  ASSERT_EQ(again.train({fmt::format("run.dir={}", again.dir().string())}).code, 0);
  expect_same_end(again, run, 8);
}

TEST(Train, KilledAtAnyMomentItContinuesBitEqual) {
  TrainingRun run, undisturbed;
  ASSERT_EQ(undisturbed.train().code, 0);
  std::mt19937 generator(11);
  for (int kills = 0; kills < 8; ++kills) {
    Program program(OPTIMUS_BINARY, run.arguments());
    std::this_thread::sleep_for(std::chrono::milliseconds(20 + generator() % 250));
    program.signal(SIGKILL);
    program.wait();
  }
  const ProgramResult last = run.train();
  ASSERT_EQ(last.code, 0) << last.err;
  expect_same_end(run, undisturbed, 40);
}

TEST(Train, SignalsSaveALastCheckpoint) {
  TrainingRun run(400), undisturbed(400);
  ASSERT_EQ(undisturbed.train({"checkpoint.every=0"}).code, 0);
  for (const auto& [signal, code] : {std::pair{SIGTERM, 143}, {SIGINT, 130}}) {
    const int64_t done = int64_t(run.losses().size());
    Program program(OPTIMUS_BINARY, run.arguments({"checkpoint.every=0"}));
    run.wait_for_steps(done + 3);
    program.signal(signal);
    EXPECT_EQ(program.wait().code, code);
    const std::optional<Checkpoint> saved = newest_valid(run.dir());
    ASSERT_TRUE(saved.has_value());
    EXPECT_EQ(saved->step(), int64_t(run.losses().size()));
  }
  ASSERT_EQ(run.train({"checkpoint.every=0"}).code, 0);
  expect_same_end(run, undisturbed, 400);
}

TEST(Train, DamagedCheckpointFallsBackToThePreviousOne) {
  TrainingRun run(20), undisturbed(20);
  ASSERT_EQ(run.train().code, 0);
  ASSERT_EQ(undisturbed.train().code, 0);
  testing::flip_byte(step_folder(run.dir(), 20) / "m.safetensors", -5);
  const ProgramResult result = run.train();
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_MENTIONS(result.err, "m.safetensors");
  EXPECT_MENTIONS(result.err, "step-00000014");
  expect_same_end(run, undisturbed, 20);
}

TEST(Train, NoValidCheckpointIsNotAFreshStart) {
  TrainingRun run(7);
  ASSERT_EQ(run.train().code, 0);
  testing::flip_byte(step_folder(run.dir(), 7) / "weights.safetensors", -5);
  EXPECT_EQ(run.train().code, 3);
  EXPECT_TRUE(fs::exists(step_folder(run.dir(), 7))) << "nothing is lost";
}

TEST(Train, FullDiskKeepsThePreviousCheckpoint) {
  TrainingRun run(20);
  ASSERT_EQ(run.train({"train.steps=7", "optimizer.warmup_steps=2", "optimizer.decay_steps=20"}).code, 0);
  const ProgramResult full = run.train({"optimizer.warmup_steps=2", "optimizer.decay_steps=20"}, ProgramLimits{20000});
  EXPECT_EQ(full.code, 3) << full.err;
  const std::optional<Checkpoint> saved = newest_valid(run.dir());
  ASSERT_TRUE(saved.has_value());
  EXPECT_EQ(saved->step(), 7);
  EXPECT_EQ(step_folders(run.dir()).size(), 1u);
}

TEST(Train, OneProcessARunFolder) {
  TrainingRun run(100000);
  Program first(OPTIMUS_BINARY, run.arguments());
  run.wait_for_steps(1);
  const ProgramResult second = run.train();
  EXPECT_EQ(second.code, 3);
  EXPECT_MENTIONS(second.err, "in use");
  first.signal(SIGKILL);
}

struct BadInput {
  std::vector<std::string> overrides;
  int code;
  std::vector<std::string> mentions;
};

TEST(Train, AGpuThatIsNotThereIsOneError) {
  if (cuda_devices() > 0) GTEST_SKIP() << "there is one";
  TrainingRun run(3);
  const ProgramResult result = run.train({"run.device=cuda"});
  EXPECT_EQ(result.code, 2);
  EXPECT_NE(result.err.find("run.device = \"cpu\""), std::string::npos) << result.err;
  EXPECT_FALSE(fs::exists(run.dir()));
}

TEST(Train, BadInputIsOneErrorAndLeavesNothing) {
  const TrainingRun run;
  const std::string p = run.path().string();
  write_npy(run.path() / "large.npy", 400, 1000, 3);
  write_npy(run.path() / "short.npy", 10, 64, 3);
  testing::write_bytes(run.path() / "empty.npy", "");
  testing::write_bytes(run.path() / "cut.npy", read_text(run.path() / "train.npy").substr(0, 300));
  const BadInput cases[] = {
      {{"model.layer=2"}, 2, {"model.layer", "did you mean model.layers"}},
      {{"trian.steps=2"}, 2, {"trian", "train"}},
      {{"model.layers=\"two\""}, 2, {"model.layers", "two", "integer"}},
      {{"model.layers=2.5"}, 2, {"model.layers"}},
      {{"run.deterministic=1"}, 2, {"run.deterministic", "true or false"}},
      {{"optimizer.schedule=cosin"}, 2, {"optimizer.schedule", "cosine"}},
      {{"model.moe.top_k=5"}, 2, {"top_k", "experts = 4"}},
      {{"model.hidden=33"}, 2, {"hidden = 33", "heads = 2"}},
      {{"model.kv_heads=3"}, 2, {"kv_heads"}},
      {{"model.hidden=4611686018427387904"}, 2, {"model.hidden"}},
      {{"model.moe.shared_experts=4611686018427387904"}, 2, {"shared_experts"}},
      {{"model.vocab=9223372036854775807"}, 2, {"model.vocab"}},
      {{"model.sequence=1e12"}, 2, {"model.sequence"}},
      {{"train.global_batch=4e15"}, 2, {"train.global_batch"}},
      {{"model.moe.experts=1e6", "model.moe.width=1e7", "model.hidden=4e6", "model.head_dim=16"}, 2, {"parameters"}},
      {{"optimizer.lr=1e300"}, 2, {"optimizer.lr"}},
      {{"optimizer.eps=1e-60"}, 2, {"optimizer.eps"}},
      {{"train.micro_batch=3"}, 2, {"micro_batch", "global_batch"}},
      {{"train.steps=0"}, 2, {"train.steps"}},
      {{"parallel.tp=2"}, 2, {"parallel.tp", "not implemented"}},
      {{"parallel.ep=2"}, 2, {"parallel.ep = 2", "mpirun -n 2"}},
      {{"model.head_dim=512", "run.device=cuda"}, 2, {"model.head_dim"}},
      {{"model.objective=diffusion"}, 2, {"model.objective"}},
      {{"memory.recompute=[\"experts\"]"}, 2, {"memory.recompute"}},
      {{"data.tokenizer=tokenizer.json"}, 2, {"tokenizer"}},
      {{fmt::format("data.train=[\"{}/large.npy\"]", p)}, 3, {"large.npy", "byte", "64"}},
      {{fmt::format("data.train=[\"{}/short.npy\"]", p)}, 3, {"short.npy", "16"}},
      {{fmt::format("data.valid=[\"{}/short.npy\"]", p)}, 3, {"short.npy", "16"}},
      {{fmt::format("data.train=[\"{}/empty.npy\"]", p)}, 3, {"empty.npy"}},
      {{fmt::format("data.train=[\"{}/cut.npy\"]", p)}, 3, {"cut.npy"}},
      {{fmt::format("data.train=[\"{}/missing.npy\"]", p)}, 3, {"missing.npy"}},
      {{fmt::format("train.init_from={}/missing", p)}, 3, {"missing"}},
      {{"run.dir=/proc/optimus-run"}, 3, {"/proc/optimus-run"}},
      {{"train.global_batch=50000000", "train.micro_batch=50000000"}, 6, {"GiB", "micro_batch"}},
  };
  for (const BadInput& bad : cases) {
    const ProgramResult result = run.train(bad.overrides);
    EXPECT_EQ(result.code, bad.code) << bad.overrides[0] << ": " << result.err;
    EXPECT_EQ(result.out, "") << bad.overrides[0];
    for (const std::string& word : bad.mentions) EXPECT_MENTIONS(result.err, word);
    EXPECT_EQ(result.err.find("internal error"), std::string::npos) << result.err;
    EXPECT_TRUE(step_folders(run.dir()).empty()) << bad.overrides[0];
    EXPECT_TRUE(run.losses().empty()) << bad.overrides[0];
  }
  ProgramResult result = run_program(OPTIMUS_BINARY, {"train", p + "/none.toml"});
  EXPECT_EQ(result.code, 2);
  EXPECT_MENTIONS(result.err, "none.toml");
  testing::write_bytes(run.path() / "broken.toml", "[model\nlayers = 2\n");
  result = run_program(OPTIMUS_BINARY, {"train", p + "/broken.toml"});
  EXPECT_EQ(result.code, 2);
  EXPECT_MENTIONS(result.err, "line 1");
}

TEST(Train, AnotherRunIsRefusedByKey) {
  TrainingRun run(7);
  ASSERT_EQ(run.train().code, 0);
  for (const auto& [override_, key] : {std::pair<std::string, std::string>{"model.hidden=64", "model.hidden"},
                                       {"train.seed=2", "train.seed"},
                                       {"model.sequence=8", "model.sequence"},
                                       {"train.global_batch=8", "train.global_batch"},
                                       {"data.shuffle=false", "data.shuffle"},
                                       {"model.moe.top_k=1", "model.moe"}}) {
    const ProgramResult result = run.train({override_, "train.steps=20"});
    EXPECT_EQ(result.code, 2) << override_;
    EXPECT_MENTIONS(result.err, key);
  }
  EXPECT_EQ(run.train({"train.steps=9", "optimizer.lr=1e-5"}).code, 0) << "the rest may change";
}

TEST(Train, NotFiniteStopsAndKeepsTheStateBeforeIt) {
  TrainingRun run(60);
  const std::vector<std::string> explode{"optimizer.lr=1e30", "optimizer.min_lr=1e30", "optimizer.clip_norm=0",
                                         "checkpoint.every=0"};
  const ProgramResult result = run.train(explode);
  EXPECT_EQ(result.code, 4) << result.err;
  EXPECT_MENTIONS(result.err, "not finite");
  const std::optional<Checkpoint> saved = newest_valid(run.dir());
  ASSERT_TRUE(saved.has_value());
  EXPECT_EQ(saved->step(), int64_t(run.losses().size()));
  const std::string weights = run.bytes(saved->step(), "weights.safetensors");
  EXPECT_EQ(run.train(explode).code, 4) << "the step is deterministic";
  EXPECT_EQ(run.bytes(saved->step(), "weights.safetensors"), weights);
}

TEST(Train, OtherDataBehindTheSamePathIsRefused) {
  TrainingRun run(20);
  ASSERT_EQ(run.train({"train.steps=7"}).code, 0);
  write_npy(run.path() / "train.npy", 16 * 200, 64, 9);
  const ProgramResult result = run.train();
  EXPECT_EQ(result.code, 2) << result.err;
  EXPECT_MENTIONS(result.err, "data.train");
}

TEST(Train, WeightsThatOverflowAreNotSaved) {
  TrainingRun run(20);
  EXPECT_EQ(run.train({"optimizer.lr=3e38", "optimizer.min_lr=3e38", "optimizer.eps=1e-30",
                       "optimizer.weight_decay=1e30", "checkpoint.every=1"})
                .code,
            4);
  EXPECT_TRUE(step_folders(run.dir()).empty());
}

TEST(Train, ARunThatHasBegunNeedsItsOriginNoMore) {
  TrainingRun source(7), run(9);
  ASSERT_EQ(source.train().code, 0);
  const std::string from = fmt::format("train.init_from={}", source.dir().string());
  ASSERT_EQ(run.train({from, "train.steps=7"}).code, 0);
  fs::remove_all(source.dir());
  const ProgramResult result = run.train({from});
  EXPECT_EQ(result.code, 0) << result.err;
}

TEST(Train, InitFromTakesWeightsAndModel) {
  TrainingRun source(7);
  ASSERT_EQ(source.train().code, 0);
  TrainingRun run(7);
  const std::string from = fmt::format("train.init_from={}", source.dir().string());
  ASSERT_EQ(run.train({from, "optimizer.lr=0", "optimizer.min_lr=0"}).code, 0);
  EXPECT_EQ(run.bytes(7, "weights.safetensors"), source.bytes(7, "weights.safetensors"));
  TrainingRun other(7);
  const ProgramResult result = other.train({from, "model.hidden=64"});
  EXPECT_EQ(result.code, 2);
  EXPECT_MENTIONS(result.err, "hidden");
}

}  // namespace
}  // namespace optimus::test
