// Small runs for tests of the engine and everything above it.
#pragma once

#include <cstdlib>
#include <random>

#include "optimus/train/backend.h"
#include "optimus/train/engine_plan.h"

namespace optimus::test {

/// What tests of engines run on: OPTIMUS_TEST_DEVICE ("cpu" or "cuda"), by default the CPU.
inline std::string test_device() {
  const char* device = std::getenv("OPTIMUS_TEST_DEVICE");
  return device ? device : "cpu";
}

/// A configuration from TOML, in f32 on the tests' device unless the overrides say otherwise.
inline RunConfig config_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  std::vector<std::string> all{"run.device=" + test_device(), "precision.compute=f32"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return parse_config(text, "test.toml", all, ConfigUse::shape);
}

/// A model with everything at once: a dense first layer, experts, grouped-query attention, QK-norm, z-loss.
inline const char* kTinyMoe = R"(
[model]
layers = 3
hidden = 24
heads = 4
kv_heads = 2
vocab = 40
sequence = 12
mlp_width = 32
qk_norm = "full"
[model.moe]
experts = 5
top_k = 2
width = 12
first_dense_layers = 1
balance_coef = 0.05
balance_unit = "sequence"
z_loss_coef = 0.01
[train]
global_batch = 4
steps = 10
[optimizer]
eps = 1e-5
)";

inline HostBatch random_batch(const RunConfig& config, uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<int32_t> tokens(size_t(config.tokens_per_step()));
  for (int32_t& token : tokens) token = int32_t(generator() % uint64_t(config.model.vocab));
  return next_token_batch(std::move(tokens), config.model.sequence);
}

/// An engine with its device, initialised from config.train.seed.
struct TestRun {
  explicit TestRun(const RunConfig& config, EngineUse use = EngineUse::train)
      : device(open_device(config.device_kind(), *make_single_process())),
        engine(make_engine(config, use, *device, plan_engine(config, use))) {
    engine->initialise(uint64_t(config.train.seed));
  }
  /// As training keeps them, in the table's layout.
  std::vector<float> weights() {
    const FlatState state = engine->master_weights();
    std::vector<float> values(size_t(state.buffer.elements()));
    for (const FlatRange& held : state.held)
      engine->read_state(state, held.offset, held.count, [&](Tensor piece, int64_t first) {
        const std::vector<float> floats = read_floats_wait(*device, piece);
        std::copy(floats.begin(), floats.end(), values.begin() + first);
      });
    return values;
  }
  std::vector<float> gradients() { return read_floats_wait(*device, engine->gradients()); }

  std::unique_ptr<Device> device;
  std::unique_ptr<Engine> engine;
};

inline double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double(a[i]) - double(b[i])) * (double(a[i]) - double(b[i]));
    norm += double(b[i]) * double(b[i]);
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

}  // namespace optimus::test
