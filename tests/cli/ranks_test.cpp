// optimus train under mpirun, as its users meet it: several processes that are stopped, killed, given bad input.
#include <cmath>
#include <fstream>
#include <set>
#include <thread>

#include <gtest/gtest.h>

#include "optimus/checkpoint/run_folder.h"
#include "support/program.h"
#include "support/temporary_folder.h"

namespace optimus::test {
namespace {

using testing::TemporaryFolder;

constexpr const char* kConfig = R"(
[model]
layers = 4
hidden = 32
heads = 2
vocab = 64
sequence = 16
[model.moe]
experts = 4
top_k = 2
width = 16
balance_unit = "sequence"
[data]
train = ["{0}/train.bin"]
valid = ["{0}/valid.bin"]
format = "raw_u16"
[train]
steps = {1}
global_batch = 8
micro_batch = 2
log_every = 1
eval_every = 10
[optimizer]
eps = 1e-5
[checkpoint]
every = 7
[run]
device = "cpu"
dir = "{0}/run"
)";

void write_tokens(const fs::path& path, int64_t tokens, int factor) {
  std::string bytes;
  for (int64_t i = 0; i < tokens; ++i) bytes += {char((i * factor + i * i / 7) % 64), '\0'};
  testing::write_bytes(path, bytes);
}

class RankedRun {
 public:
  explicit RankedRun(int64_t steps) {
    // Open MPI refuses root and more ranks than cores, spins while it waits, and copies between processes by a system call
    // that containers forbid.
    for (const auto& [name, value] : {std::pair{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                      {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                      {"OMPI_MCA_rmaps_base_oversubscribe", "1"},
                                      {"OMPI_MCA_hwloc_base_binding_policy", "none"},
                                      {"OMPI_MCA_mpi_yield_when_idle", "1"},
                                      {"OMPI_MCA_btl_vader_single_copy_mechanism", "none"},
                                      {"ASAN_OPTIONS", "detect_leaks=0"},
                                      {"OMP_NUM_THREADS", "1"}})
      setenv(name, value, 1);
    write_tokens(path() / "train.bin", 16 * 300 + 5, 5);
    write_tokens(path() / "valid.bin", 16 * 7, 3);
    testing::write_bytes(path() / "run.toml", fmt::format(fmt::runtime(kConfig), path().string(), steps));
  }
  const fs::path& path() const { return folder_.path(); }
  fs::path dir() const { return path() / "run"; }

  std::vector<std::string> arguments(int ranks, const std::vector<std::string>& overrides) const {
    std::vector<std::string> out{"-n", std::to_string(ranks), OPTIMUS_BINARY, "train", (path() / "run.toml").string()};
    for (const std::string& text : overrides) out.insert(out.end(), {"--set", text});
    return out;
  }
  ProgramResult train(int ranks, const std::vector<std::string>& overrides = {}) const {
    return run_program(OPTIMUS_MPIEXEC, arguments(ranks, overrides));
  }
  std::vector<nlohmann::json> records() const {
    std::vector<nlohmann::json> out;
    std::ifstream file(dir() / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      nlohmann::json record = nlohmann::json::parse(line, nullptr, false);
      if (!record.is_discarded()) out.push_back(std::move(record));
    }
    return out;
  }
  void wait_for_steps(size_t steps) const {
    for (int i = 0; i < 6000; ++i) {
      if (records().size() >= steps) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    FAIL() << "training did not reach step " << steps;
  }
  /// Processes of this run that are still there, launcher and ranks.
  std::vector<pid_t> processes() const {
    std::vector<pid_t> found;
    for (const fs::directory_entry& entry : fs::directory_iterator("/proc")) {
      std::ifstream file(entry.path() / "cmdline");
      const std::string line((std::istreambuf_iterator<char>(file)), {});
      if (line.find(path().string()) != std::string::npos) found.push_back(std::stoi(entry.path().filename()));
    }
    return found;
  }
  /// Ranks only: the processes whose program is optimus.
  std::vector<pid_t> ranks() const {
    std::vector<pid_t> found;
    for (pid_t pid : processes()) {
      std::error_code gone;
      if (fs::read_symlink(fmt::format("/proc/{}/exe", pid), gone) == fs::canonical(OPTIMUS_BINARY))
        found.push_back(pid);
    }
    return found;
  }

 private:
  TemporaryFolder folder_;
};

void expect_same_losses(const RankedRun& run, const RankedRun& expected, size_t steps) {
  const auto got = run.records(), wanted = expected.records();
  ASSERT_EQ(got.size(), steps);
  ASSERT_EQ(wanted.size(), steps);
  for (size_t i = 0; i < steps; ++i) {
    EXPECT_EQ(got[i]["step"], i + 1);
    EXPECT_NEAR(double(got[i]["loss"]), double(wanted[i]["loss"]), 1e-4) << "step " << i + 1;
    EXPECT_EQ(got[i].contains("valid_loss"), wanted[i].contains("valid_loss"));
    if (got[i].contains("valid_loss")) {
      EXPECT_NEAR(double(got[i]["valid_loss"]), double(wanted[i]["valid_loss"]), 1e-4) << "step " << i + 1;
    }
  }
}

TEST(Ranks, TrainAsOneDoes) {
  RankedRun one(20), two(20), four(20);
  ASSERT_EQ(run_program(OPTIMUS_BINARY, {"train", (one.path() / "run.toml").string()}).code, 0);
  const ProgramResult result = two.train(2, {"parallel.ep=2"});
  ASSERT_EQ(result.code, 0) << result.err;
  expect_same_losses(two, one, 20);
  ASSERT_EQ(four.train(4, {"parallel.ep=2", "parallel.pp=2", "parallel.schedule=zero_bubble"}).code, 0);
  expect_same_losses(four, one, 20);
  EXPECT_NE(result.err.find("memory by segment"), std::string::npos);
  EXPECT_EQ(result.err.find("memory by segment"), result.err.rfind("memory by segment"))
      << "only the first rank speaks";
  // What they wrote is a checkpoint like any other.
  const ProgramResult verified = run_program(OPTIMUS_BINARY, {"verify", four.dir().string()});
  EXPECT_EQ(verified.code, 0) << verified.err;
  EXPECT_EQ(
      run_program(OPTIMUS_BINARY, {"eval", four.dir().string(), "--data", (four.path() / "valid.bin").string()}).code,
      0);
}

TEST(Ranks, BenchTellsWhatTransfersAreWaitedFor) {
  RankedRun run(20);
  const ProgramResult result =
      run_program(OPTIMUS_MPIEXEC, {"-n", "2", OPTIMUS_BINARY, "bench", "step", (run.path() / "run.toml").string(),
                                    "--steps", "3", "--json", "--set", "parallel.ep=2"});
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json json = nlohmann::json::parse(result.out);
  std::set<std::string> groups;
  for (const auto& [name, seconds] : json.at("waited_seconds").items()) {
    groups.insert(name);
    EXPECT_GT(seconds.get<double>(), 0) << name;
    EXPECT_LT(seconds.get<double>(), json.at("step_seconds").get<double>()) << name;
  }
  EXPECT_EQ(groups, (std::set<std::string>{"dp", "ep", "world"}));
}

TEST(Ranks, ASignalSavesAtOneStepAndAnotherLayoutGoesOn) {
  RankedRun run(60), undisturbed(60);
  ASSERT_EQ(undisturbed.train(2, {"parallel.ep=2"}).code, 0);
  const std::vector<std::pair<int, std::vector<std::string>>> layouts{
      {2, {"parallel.ep=2"}}, {4, {"parallel.pp=2", "parallel.ep=2"}}, {2, {"parallel.pp=2"}}};
  size_t reached = 10;
  for (const auto& [ranks, overrides] : layouts) {
    Program program(OPTIMUS_MPIEXEC, run.arguments(ranks, overrides));
    run.wait_for_steps(reached);
    // As a batch system that knows the ranks would: one of them alone, which all must agree on.
    const std::vector<pid_t> pids = run.ranks();
    ASSERT_EQ(pids.size(), size_t(ranks));
    kill(pids.back(), SIGTERM);
    const ProgramResult result = program.wait();
    EXPECT_EQ(result.code, 143) << result.err;
    const std::vector<fs::path> steps = step_folders(run.dir());
    ASSERT_FALSE(steps.empty());
    EXPECT_EQ(Checkpoint(steps.front()).step(), int64_t(run.records().size())) << "the last step was saved";
    reached = run.records().size() + 5;
  }
  ASSERT_EQ(run.train(1).code, 0);
  expect_same_losses(run, undisturbed, 60);
}

TEST(Ranks, AKilledProcessEndsAllAndNothingIsLost) {
  RankedRun run(4000);
  for (int victim : {0, 1, 3}) {
    Program program(OPTIMUS_MPIEXEC, run.arguments(4, {"parallel.pp=2", "parallel.ep=2"}));
    const size_t before = run.records().size();
    run.wait_for_steps(before + 9);
    const std::vector<pid_t> pids = run.ranks();
    ASSERT_EQ(pids.size(), 4u);
    const auto killed = std::chrono::steady_clock::now();
    kill(pids[size_t(victim)], SIGKILL);
    const ProgramResult result = program.wait();
    EXPECT_NE(result.code, 0);
    EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(30));
    for (int i = 0; i < 100 && !run.processes().empty(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(run.processes().empty()) << "a process was left behind";
    EXPECT_TRUE(newest_valid(run.dir()).has_value());
  }
  // It goes on from its newest checkpoint: 7, 14, ... steps.
  const int64_t step = newest_valid(run.dir())->step();
  EXPECT_EQ(run.train(2, {fmt::format("train.steps={}", step + 3), "train.eval_every=0"}).code, 0);
  EXPECT_EQ(int64_t(run.records().size()), step + 3);
}

TEST(Ranks, AStoppedProcessIsNotADeadOne) {
  RankedRun run(30);
  Program program(OPTIMUS_MPIEXEC, run.arguments(2, {"parallel.ep=2"}));
  run.wait_for_steps(5);
  const std::vector<pid_t> pids = run.ranks();
  ASSERT_EQ(pids.size(), 2u);
  kill(pids[1], SIGSTOP);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  kill(pids[1], SIGCONT);
  EXPECT_EQ(program.wait().code, 0);
  EXPECT_EQ(run.records().size(), 30u);
}

TEST(Ranks, BadInputIsOneErrorWithItsCode) {
  struct Case {
    int ranks;
    std::vector<std::string> overrides;
    int code;
    std::vector<std::string> words;
  };
  RankedRun run(4);
  write_tokens(run.path() / "bad.bin", 16 * 4, 3);
  std::string bytes = read_text(run.path() / "bad.bin");
  bytes[2 * 16 * 3] = 64;  // in the last window
  testing::write_bytes(run.path() / "bad.bin", bytes);
  for (const Case& c : std::vector<Case>{
           {2, {"parallel.pp=3"}, 2, {"pp = 3", "2"}},
           {4, {"parallel.ep=3"}, 2, {"ep = 3", "4"}},
           {3, {}, 2, {"train.global_batch = 8", "dp = 3", "9"}},
           {2, {"parallel.tp=2"}, 2, {"parallel.tp"}},
           {2, {"model.moe.experts=3", "parallel.ep=2"}, 2, {"ep = 2", "experts = 3"}},
           {2, {"parallel.pp=2", "parallel.stage_layers=[1,2]"}, 2, {"stage_layers", "4 layers"}},
           {2, {"parallel.pp=2", "parallel.virtual_stages=2"}, 2, {"virtual_stages"}},
           {2,
            {"parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2", "train.global_batch=6"},
            2,
            {"interleaved"}},
           {2, {"data.train=[\"/no/such/file\"]"}, 3, {"/no/such/file"}},
           {2, {"model.vocab=63"}, 3, {"train.bin"}},
           // Read by the second rank alone, in the middle of the run.
           {2,
            {fmt::format("data.valid=[\"{}/bad.bin\"]", run.path().string()), "train.eval_every=2"},
            3,
            {"bad.bin", "64"}},
           {2, {"optimizer.lr=1e30", "optimizer.warmup_steps=0", "train.steps=50"}, 4, {"not finite"}},
       }) {
    SCOPED_TRACE(fmt::format("{} ranks, {}", c.ranks, fmt::join(c.overrides, " ")));
    std::error_code ignored;
    fs::remove_all(run.dir(), ignored);
    const ProgramResult result = run.train(c.ranks, c.overrides);
    EXPECT_EQ(result.code, c.code) << result.err;
    size_t errors = 0;
    for (size_t at = 0; (at = result.err.find("error: ", at)) != std::string::npos; ++at) ++errors;
    EXPECT_EQ(errors, 1u) << result.err;
    for (const std::string& word : c.words) EXPECT_MENTIONS(result.err, word);
  }
}

}  // namespace
}  // namespace optimus::test
