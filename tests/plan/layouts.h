// Published runs as configurations.
#pragma once

#include "optimus/plan/search.h"

namespace optimus::test {

/// Sequences of 2048, one a micro-batch, one a rank and step (times pp), bf16 throughout: the runs of the Mula paper.
struct PublishedRun {
  const char* model;
  int64_t ranks, pp, ep;
};
inline constexpr PublishedRun kPublished[] = {
    {"mula-20b-a2b", 3072, 1, 12}, {"mula-100b-a7b", 3072, 4, 12}, {"mula-220b-a10b", 3072, 8, 12}};

inline RunConfig published_config(const PublishedRun& run, const std::string& sharding,
                                  const std::string& dispatcher = "allgather") {
  const std::string text = fmt::format(R"(
[model]
preset = "{}"
sequence = 2048
[train]
global_batch = {}
micro_batch = 1
[optimizer]
sharding = "{}"
[parallel]
pp = {}
ep = {}
dispatcher = "{}"
[precision]
compute = "bf16"
gradients = "bf16"
)",
                                       run.model, run.ranks, sharding, run.pp, run.ep, dispatcher);
  return parse_config(text, "published.toml", {}, ConfigUse::shape, run.ranks);
}

inline Hardware hardware_named(const std::string& name) {
  return load_hardware(OPTIMUS_SOURCE_DIR "/hardware/" + name + ".toml");
}

inline Prediction predict(const RunConfig& config, const Hardware& hardware) {
  return optimus::predict(config, step_work(config), hardware);
}

}  // namespace optimus::test
