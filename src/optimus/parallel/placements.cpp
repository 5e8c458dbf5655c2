#include "optimus/parallel/placements.h"

#include <numeric>

#include "optimus/base/error.h"

namespace optimus {
namespace {

constexpr auto kUsage = ErrorKind::kUsage;

}  // namespace

std::vector<int64_t> layers_of_stages(const ModelConfig& model, const ParallelConfig& parallel) {
  if (!parallel.stage_layers.empty()) return parallel.stage_layers;
  const int64_t stages = parallel.pp * parallel.virtual_stages;
  std::vector<int64_t> layers(size_t(stages), model.layers / stages);
  for (int64_t stage = 0; stage < model.layers % stages; ++stage) ++layers[size_t(stage)];
  return layers;
}

std::vector<Placement> placements_of(const ModelConfig& model, const ParallelConfig& parallel, const MeshShape& shape,
                                     const MeshPlace& place) {
  const std::vector<int64_t> layers = layers_of_stages(model, parallel);
  const int64_t stages = int64_t(layers.size()), experts = model.moe ? model.moe->experts / shape.ep : 0;
  std::vector<Placement> placements;
  for (int64_t stage = place.pp; stage < stages; stage += shape.pp)
    placements.push_back({std::accumulate(layers.begin(), layers.begin() + stage, int64_t(0)), layers[size_t(stage)],
                          stage == 0, stage == stages - 1, place.ep * experts, experts});
  return placements;
}

void check_layout(const ModelConfig& model, const ParallelConfig& parallel, const MeshShape& shape,
                  const std::string& name) {
  const int64_t stages = parallel.pp * parallel.virtual_stages;
  require(parallel.virtual_stages >= 1, kUsage, "{}: parallel.virtual_stages = {} must be at least 1", name,
          parallel.virtual_stages);
  require(
      stages <= model.layers, kUsage,
      "{}: parallel.pp = {} times virtual_stages = {} makes {} stages, but the model has {} layers; the most is pp * "
      "virtual_stages = {}",
      name, parallel.pp, parallel.virtual_stages, stages, model.layers, model.layers);
  const std::vector<int64_t>& given = parallel.stage_layers;
  if (!given.empty()) {
    require(int64_t(given.size()) == stages, kUsage,
            "{}: parallel.stage_layers has {} numbers; pp * virtual_stages = {} are needed", name, given.size(),
            stages);
    int64_t sum = 0;
    for (int64_t layers : given) {
      require(layers >= 1 && layers <= model.layers, kUsage, "{}: parallel.stage_layers: a stage of {} layers", name,
              layers);
      sum += layers;
    }
    require(sum == model.layers, kUsage, "{}: parallel.stage_layers add up to {}; the model has {} layers", name, sum,
            model.layers);
  }
  if (shape.ep == 1) return;
  require(model.moe_layers() > 0, kUsage, "{}: parallel.ep = {} needs a model with experts; this one has none", name,
          shape.ep);
  const int64_t experts = model.moe->experts;
  require(experts % shape.ep == 0, kUsage,
          "{}: parallel.ep = {} does not divide model.moe.experts = {}; the nearest that does is {}", name, shape.ep,
          experts, nearest_divisor(experts, shape.ep));
}

}  // namespace optimus
