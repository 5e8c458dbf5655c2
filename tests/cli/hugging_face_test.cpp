// Models of Hugging Face transformers through the program: import, losses, logits, gradients, training, export. The
// fixtures hold what transformers computes (tools/reference/make_hf_cases.py).
#include <fstream>

#include <gtest/gtest.h>

#include "optimus/checkpoint/convert.h"
#include "optimus/checkpoint/safetensors.h"
#include "support/program.h"
#include "support/temporary_folder.h"

namespace optimus::test {
namespace {

using testing::TemporaryFolder;

std::vector<float> floats_of(const SafetensorsReader& file, const std::string& name) {
  const SafetensorsTensor* tensor = file.find(name);
  if (!tensor) throw std::runtime_error("no tensor " + name + " in " + file.path().string());
  std::vector<float> values(size_t(tensor->bytes / 4));
  widen(tensor->dtype, file.bytes(*tensor).data(), values);
  return values;
}

double relative(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(double(a[i]) - double(b[i]), 2);
    norm += std::pow(double(b[i]), 2);
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

// The gradient under the name of transformers' memory, put together from our per-expert tensors.
std::vector<float> gradient_of(const SafetensorsReader& ours, const std::string& name, int64_t experts) {
  const size_t fused = std::min(name.find("gate_up_proj"), name.find("experts.down_proj"));
  const bool mixtral = ours.find("model.layers.0.block_sparse_moe.gate.weight") != nullptr;
  if (fused == std::string::npos) {
    const size_t gate = name.find("mlp.gate.");
    return floats_of(
        ours, mixtral && gate != std::string::npos ? std::string(name).replace(gate, 3, "block_sparse_moe") : name);
  }
  const std::string layer = name.substr(0, name.find(".mlp."));
  const bool gate_up = name.find("gate_up_proj") != std::string::npos;
  std::vector<float> out;
  for (int64_t e = 0; e < experts; ++e) {
    const std::string expert = fmt::format("{}.{}.experts.{}.", layer, mixtral ? "block_sparse_moe" : "mlp", e);
    const std::vector<std::string> parts =
        gate_up ? (mixtral ? std::vector<std::string>{"w1", "w3"} : std::vector<std::string>{"gate_proj", "up_proj"})
                : (mixtral ? std::vector<std::string>{"w2"} : std::vector<std::string>{"down_proj"});
    for (const std::string& part : parts) {
      const std::vector<float> values = floats_of(ours, expert + part + ".weight");
      out.insert(out.end(), values.begin(), values.end());
    }
  }
  return out;
}

class HuggingFaceCase : public ::testing::TestWithParam<std::string> {
 protected:
  fs::path source() const { return fs::path(OPTIMUS_SOURCE_DIR "/tests/fixtures/hf") / GetParam(); }
  std::string at(const std::string& name) const { return (folder_.path() / name).string(); }
  nlohmann::json expected() const { return nlohmann::json::parse(read_text(source() / "expected.json")); }
  nlohmann::json program(const std::vector<std::string>& arguments) const {
    const ProgramResult result = run_program(OPTIMUS_BINARY, arguments);
    EXPECT_EQ(result.code, 0) << result.err;
    const size_t line = result.out.rfind('\n', result.out.size() - 2);
    return nlohmann::json::parse(result.out.substr(line == std::string::npos ? 0 : line + 1));
  }
  void SetUp() override { program({"import", source().string(), "--out", at("model")}); }

  TemporaryFolder folder_;
};

TEST_P(HuggingFaceCase, LossesLogitsGradients) {
  const nlohmann::json result = program({"eval", at("model"), "--ids", (source() / "input_ids.npy").string(),
                                         "--logits", at("logits"), "--gradients", at("gradients")});
  const nlohmann::json expect = expected();
  EXPECT_NEAR(result.at("loss").get<double>(), expect.at("loss").get<double>(), 1e-5);
  EXPECT_NEAR(result.at("ce").get<double>(), expect.at("ce").get<double>(), 1e-5);
  if (!expect.at("aux").is_null()) {
    EXPECT_NEAR(result.at("balance_loss").get<double>(), expect.at("aux").get<double>(), 1e-5);
  }

  EXPECT_LT(relative(floats_of(SafetensorsReader(at("logits")), "logits"),
                     floats_of(SafetensorsReader(source() / "logits.safetensors"), "logits")),
            1e-5);
  const SafetensorsReader theirs(source() / "grads.safetensors"), ours(at("gradients"));
  for (const SafetensorsTensor& tensor : theirs.tensors()) {
    const int64_t experts = tensor.shape.size() == 3 ? tensor.shape[0] : 0;
    EXPECT_LT(relative(gradient_of(ours, tensor.name, experts), floats_of(theirs, tensor.name)), 1e-5) << tensor.name;
  }
}

TEST_P(HuggingFaceCase, TwentyStepsOfTraining) {
  testing::write_bytes(folder_.path() / "run.toml", fmt::format(R"(
[model]
sequence = 24
[data]
train = ["{}/train_ids.npy"]
shuffle = false
[train]
init_from = "{}"
steps = 20
global_batch = 2
log_every = 1
[optimizer]
lr = 1e-3
schedule = "constant"
warmup_steps = 0
[run]
dir = "{}"
)",
                                                                source().string(), at("model"), at("run")));
  const ProgramResult result = run_program(OPTIMUS_BINARY, {"train", at("run.toml")});
  ASSERT_EQ(result.code, 0) << result.err;
  const nlohmann::json expect = expected();
  std::ifstream metrics(at("run/metrics.jsonl"));
  size_t step = 0;
  for (std::string line; std::getline(metrics, line); ++step) {
    const nlohmann::json record = nlohmann::json::parse(line);
    EXPECT_NEAR(record.at("loss").get<double>(), expect.at("train_losses")[step].get<double>(), 2e-4) << step;
    EXPECT_NEAR(record.at("grad_norm").get<double>() / expect.at("grad_norms")[step].get<double>(), 1, 1e-3) << step;
  }
  EXPECT_EQ(step, 20u);

  // What was trained from an import exports as what was imported: its names, its type, its files.
  program({"export", at("run"), "--out", at("trained")});
  EXPECT_EQ(read_text(source() / "config.json"), read_text(at("trained") + "/config.json"));
  EXPECT_EQ(SafetensorsReader(at("trained") + "/model.safetensors").tensors().size(),
            SafetensorsReader(source() / "model.safetensors").tensors().size());
}

TEST_P(HuggingFaceCase, ExportGivesEveryTensorBack) {
  program({"export", at("model"), "--out", at("exported")});
  const SafetensorsReader before(source() / "model.safetensors"), after(at("exported") + "/model.safetensors");
  ASSERT_EQ(before.tensors().size(), after.tensors().size());
  for (const SafetensorsTensor& tensor : before.tensors()) {
    const SafetensorsTensor* found = after.find(tensor.name);
    ASSERT_NE(found, nullptr) << tensor.name;
    EXPECT_EQ(found->shape, tensor.shape);
    EXPECT_EQ(found->dtype, tensor.dtype);
    const auto a = before.bytes(tensor), b = after.bytes(*found);
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end())) << tensor.name;
  }
  EXPECT_EQ(read_text(source() / "config.json"), read_text(at("exported") + "/config.json"));
}

std::vector<std::string> cases() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(OPTIMUS_SOURCE_DIR "/tests/fixtures/hf"))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

INSTANTIATE_TEST_SUITE_P(Transformers, HuggingFaceCase, ::testing::ValuesIn(cases()),
                         [](const auto& name) { return name.param; });

}  // namespace
}  // namespace optimus::test
