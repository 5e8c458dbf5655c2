// Which layers and experts a rank holds.
#pragma once

#include <string>
#include <vector>

#include "optimus/comm/mesh.h"
#include "optimus/model/config.h"
#include "optimus/model/placement.h"
#include "optimus/parallel/config.h"

namespace optimus {

/// Layers of every stage (pp * virtual_stages of them): parallel.stage_layers, or as equal as can be, the longer ones
/// first (the last stage also has the head).
std::vector<int64_t> layers_of_stages(const ModelConfig& model, const ParallelConfig& parallel);

/// The rank's chunks, first to last.
std::vector<Placement> placements_of(const ModelConfig& model, const ParallelConfig& parallel, const MeshShape& shape,
                                     const MeshPlace& place);

/// Error(kUsage), starting with `name`, for a model that cannot be laid out so.
void check_layout(const ModelConfig& model, const ParallelConfig& parallel, const MeshShape& shape,
                  const std::string& name);

}  // namespace optimus
