// A checkpoint ready to be asked: its model on this machine in f32, with its tokenizer.
#pragma once

#include <memory>

#include "optimus/checkpoint/checkpoint.h"
#include "optimus/data/tokenizer.h"
#include "optimus/train/engine.h"

namespace optimus {

class Inference {
 public:
  /// `sequences` of `sequence` tokens are the largest batch (EngineUse::generation: one, cached). `sequence` 0: the
  /// model's own; Error(kUsage) when it is longer.
  /// `device` as run.device.
  Inference(Checkpoint checkpoint, EngineUse use, const std::string& device, int64_t sequences, int64_t sequence = 0);

  Checkpoint& checkpoint() { return checkpoint_; }
  Engine& engine() { return *engine_; }
  Device& device() { return *device_; }
  const RunConfig& config() const { return engine_->config(); }
  const Tokenizer& tokenizer() const { return *tokenizer_; }

 private:
  Checkpoint checkpoint_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

}  // namespace optimus
