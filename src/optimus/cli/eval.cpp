// optimus eval CHECKPOINT --data PATH [--sequences N]
// optimus eval CHECKPOINT --ids FILE.npy [--logits OUT.safetensors] [--gradients OUT.safetensors]

#include <CLI/CLI.hpp>

#include "optimus/checkpoint/export.h"
#include "optimus/checkpoint/run_folder.h"
#include "optimus/cli/commands.h"
#include "optimus/cli/options.h"
#include "optimus/train/evaluation.h"
#include "optimus/train/inference.h"

namespace optimus {
namespace {

struct EvalOptions {
  std::string checkpoint, data, ids, logits, gradients, device = "auto";
  int64_t sequences = 0;
};

void print(const nlohmann::ordered_json& result) { fmt::print("{}\n", result.dump()); }

void evaluate_data(const EvalOptions& options) {
  constexpr int64_t kSequencesAtOnce = 8;
  Inference inference(resolve_checkpoint(options.checkpoint), EngineUse::evaluation, options.device, kSequencesAtOnce);
  const ModelConfig& model = inference.config().model;
  DataConfig data;
  data.valid = {{options.data, std::nullopt}};
  const EvalWindows windows(data, model.sequence, model.vocab, options.sequences);
  const auto [loss, weight] =
      evaluate_windows_wait(inference.engine(), windows, kSequencesAtOnce, *make_single_process());
  require(std::isfinite(loss), ErrorKind::kNumerical, "{}: the loss is not finite", options.checkpoint);
  print({{"loss", loss},
         {"perplexity", std::exp(loss)},
         {"tokens", int64_t(weight)},
         {"sequences", windows.windows()},
         {"step", inference.checkpoint().step()}});
}

HostBatch read_ids(const std::string& path, int64_t vocab) {
  const TokenFile file(path, "npy", vocab);
  const std::vector<int64_t>& shape = file.shape();
  require(shape.size() == 2 && shape[0] >= 1 && shape[1] >= 2, ErrorKind::kData,
          "{}: shape [{}] is not [sequences, tokens of each] with at least 2 tokens", path, fmt::join(shape, ", "));
  std::vector<int32_t> tokens(size_t(file.size()));
  file.read(0, file.size(), tokens.data());
  return next_token_batch(std::move(tokens), shape[1]);
}

// The logits [B,S,V] in f32, chunk by chunk as they come.
void write_logits(const std::string& path, Inference& inference, const HostBatch& batch, StepResult& result) {
  const int64_t vocab = inference.config().model.vocab;
  SafetensorsWriter writer(path, {{"logits", "F32", {batch.sequences, batch.sequence_length, vocab}, 0, 0}});
  result = inference.engine().evaluate_wait(batch, [&](int64_t, Tensor logits) {
    const std::vector<float> values = read_floats_wait(inference.device(), logits);
    writer.write(std::as_bytes(std::span(values)));
  });
  writer.close();
}

// The gradients under the names of the imported folder's tensors.
void write_gradients(const std::string& path, Inference& inference) {
  const std::vector<HuggingFaceTensor> tensors = hugging_face_tensors(inference.checkpoint());
  std::vector<SafetensorsTensor> header;
  for (const HuggingFaceTensor& tensor : tensors) {
    std::vector<int64_t> shape;
    for (int i = 0; i < tensor.shape.rank(); ++i) shape.push_back(tensor.shape[i]);
    header.push_back({tensor.name, "F32", shape, 0, 0});
  }
  SafetensorsWriter writer(path, header);
  Engine& engine = inference.engine();
  for (const HuggingFaceTensor& tensor : tensors) {
    const Parameter& parameter = engine.table()[engine.table().find(tensor.parameter)];
    const Tensor part = engine.gradients().slice(parameter.offset + tensor.first_element(), tensor.shape.elements());
    const std::vector<float> values = read_floats_wait(inference.device(), part);
    writer.write(std::as_bytes(std::span(values)));
  }
  writer.close();
}

void evaluate_ids(const EvalOptions& options) {
  Checkpoint checkpoint = resolve_checkpoint(options.checkpoint);
  const HostBatch batch = read_ids(options.ids, model_config_of(checkpoint).vocab);
  Inference inference(std::move(checkpoint), options.gradients.empty() ? EngineUse::evaluation : EngineUse::gradients,
                      options.device, batch.sequences, batch.sequence_length);
  StepResult result;
  if (!options.logits.empty()) write_logits(options.logits, inference, batch, result);
  if (!options.gradients.empty()) {
    result = inference.engine().gradients_wait(batch);
    write_gradients(options.gradients, inference);
  } else if (options.logits.empty()) {
    result = inference.engine().evaluate_wait(batch);
  }
  print({{"loss", result.loss},
         {"ce", result.cross_entropy},
         {"balance_loss", result.balance_loss},
         {"z_loss", result.z_loss},
         {"tokens", batch.sequences * (batch.sequence_length - 1)}});
}

}  // namespace

void add_eval(CLI::App& program) {
  const auto options = std::make_shared<EvalOptions>();
  CLI::App* command =
      program.add_subcommand("eval", "Loss of a checkpoint on data, or its losses, logits and gradients on given ids");
  command->add_option("CHECKPOINT", options->checkpoint, "A step's folder, an imported folder or a run.dir")
      ->required();
  auto* data = command->add_option("--data", options->data, "Token file")->type_name("PATH");
  command->add_option("--sequences", options->sequences, "At most that many windows; 0: all")
      ->needs(data)
      ->check(CLI::NonNegativeNumber);
  auto* ids = command->add_option("--ids", options->ids, "Token ids [sequences, tokens], one micro-batch")
                  ->type_name("FILE.npy")
                  ->excludes(data);
  command->add_option("--logits", options->logits, "Writes the f32 logits [B,S,V]")
      ->type_name("OUT.safetensors")
      ->needs(ids);
  command->add_option("--gradients", options->gradients, "Writes the f32 gradients of loss")
      ->type_name("OUT.safetensors")
      ->needs(ids);
  add_device_option(*command, options->device);
  command->callback([options] {
    require(!options->data.empty() || !options->ids.empty(), ErrorKind::kUsage,
            "eval needs --data PATH or --ids FILE.npy");
    options->ids.empty() ? evaluate_data(*options) : evaluate_ids(*options);
  });
}

}  // namespace optimus
