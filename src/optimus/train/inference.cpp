#include "optimus/train/inference.h"

#include "optimus/train/backend.h"
#include "optimus/train/engine_plan.h"
#include "optimus/train/run_state.h"

namespace optimus {
namespace {

std::string tokenizer_name(const Checkpoint& checkpoint) {
  const nlohmann::json& config = checkpoint.manifest().config;
  const auto data = config.find("data");
  return data != config.end() && data->is_object() ? data->value("tokenizer", "byte") : "byte";
}

}  // namespace

Inference::Inference(Checkpoint checkpoint, EngineUse use, const std::string& device, int64_t sequences,
                     int64_t sequence)
    : checkpoint_(std::move(checkpoint)) {
  RunConfig config;
  config.run.device = device != "auto" ? device : cuda_devices() > 0 ? "cuda" : "cpu";
  device_ = open_device(config.device_kind(), *make_single_process());
  config.model = model_config_of(checkpoint_);
  if (sequence > 0) {
    require(sequence <= config.model.sequence, ErrorKind::kUsage,
            "sequences of {} tokens are longer than model.sequence = {} of {}", sequence, config.model.sequence,
            checkpoint_.folder().string());
    config.model.sequence = sequence;
  }
  config.train.global_batch = config.train.micro_batch = sequences;
  engine_ = make_engine(config, use, *device_, plan_engine(config, use));
  load_weights(*engine_, checkpoint_);
  tokenizer_ = make_tokenizer(tokenizer_name(checkpoint_));
}

}  // namespace optimus
