// Layouts of a tiny model over the ranks of this run, and what one rank computes, to compare them with.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "distributed/machine.h"

namespace optimus::test {

/// A model with its losses; every variant is run in every layout.
struct Variant {
  const char* name;
  std::vector<std::string> overrides;
  int steps = 5;
  /// Layers of the stages when there are two, where they shall not be equal.
  const char* two_stages = "";
};
const std::vector<Variant>& variants();
const Variant& variant_named(const std::string& name);

struct Layout {
  int pp = 1, ep = 1, dp = 1;
  std::string dispatcher = "auto", sharding = "ep_aware", schedule = "1f1b";
  int virtual_stages = 1;
  std::string unit = "sequence";

  std::vector<std::string> choices() const;
  std::string text() const;
  std::vector<std::string> overrides(const Variant& variant) const;
};
std::vector<Layout> layouts_for(const Variant& variant, int ranks);
/// A subset in which every pair of choices that occurs in `all` occurs.
std::vector<Layout> covering(const std::vector<Layout>& all);

/// One rank alone. Tensors by parameter name, whole.
struct ReferenceRun {
  std::vector<StepResult> results;
  std::map<std::string, std::vector<float>> initial_weights, weights;
  std::vector<std::map<std::string, std::vector<float>>> gradients;  ///< of every step
  double smallest_gap = 1;  ///< (p_k - p_{k+1}) / p_k of the k-th and the next probability, over all tokens and steps
};
/// Computed once a variant and balance unit.
const ReferenceRun& reference_of(const Variant& variant, const std::string& unit);

/// This rank of a run in a layout.
struct LayoutRun {
  LayoutRun(const Variant& variant, const Layout& layout, const std::vector<std::string>& more = {});
  HostBatch batch(int64_t step) const;

  RunConfig config;
  std::unique_ptr<Device> device;
  std::unique_ptr<Engine> engine;
};

/// Trains as the reference did and compares everything. Collective.
void expect_equal_to(const ReferenceRun& reference, const Variant& variant, const Layout& layout);

/// Expects the weights to be those of the reference's end. Collective.
void expect_state_after(Engine& engine, Device& device, const ReferenceRun& reference);

/// Sequences [first, first + count) of a batch.
HostBatch part_of(const HostBatch& whole, int64_t first, int64_t count);

/// Expects the weights of all ranks that replicate a bucket to have the same bits. Collective.
void expect_replicas_equal(LayoutRun& run);

}  // namespace optimus::test
