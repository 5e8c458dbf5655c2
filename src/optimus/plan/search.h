// The layouts of a number of ranks that fit a kind of hardware, by predicted step time.
//
// Tried are all pp, ep and powers of two as micro_batch that divide what they must, the schedules 1f1b, interleaved
// with 2 and 4 virtual stages and zero_bubble, both dispatchers; layers split evenly, sharding ep_aware. A layout that
// cannot beat the best ones even if nothing but its products took time, at the full rate, is not predicted.
#pragma once

#include "optimus/plan/prediction.h"

namespace optimus {

/// The dispatcher that a run has: "auto" resolved, "local" without others to send tokens to.
std::string dispatcher_of(const RunConfig& config);

/// Memory of a run: that of the pipeline rank that needs most.
struct LargestMemory {
  int pp = 0;
  EnginePlan plan;
};
LargestMemory largest_memory(const RunConfig& config, const std::optional<Hardware>& hardware);

struct Candidate {
  RunConfig config;
  int64_t memory_bytes = 0;
  Prediction prediction;
};

struct SearchResult {
  std::vector<Candidate> best;  ///< fastest first
  int64_t layouts = 0;          ///< possible ones, whether they fit or not
};

/// `config` gives model, global batch and mesh.world(); at most `most` layouts are returned.
SearchResult search_layouts(const RunConfig& config, const Hardware& hardware, size_t most = 10);

}  // namespace optimus
