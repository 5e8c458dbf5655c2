// What `optimus plan` says: as text and as JSON.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "optimus/plan/search.h"

namespace optimus {

struct ParameterCounts {
  int64_t total, active, expert, replicated;
};
ParameterCounts count_parameters(const ModelConfig& model);

struct PlanReport {
  RunConfig config;
  ParameterCounts parameters;
  LargestMemory memory;
  std::string device;        ///< "Aurora tile", "this machine"
  int64_t device_bytes = 0;  ///< 0: unknown
  // Of several ranks:
  std::vector<Communication> communication;
  double bubble = 0;  ///< the prediction's, or by FLOPs alone
  std::optional<Prediction> prediction;

  bool fits() const { return device_bytes == 0 || memory.plan.memory.total() <= device_bytes; }
};

/// Without hardware: memory against this machine's, and no times.
PlanReport make_report(const RunConfig& config, const std::optional<Hardware>& hardware);

/// `layout`: also say how the ranks share the model and what they send.
std::string to_text(const PlanReport& report, bool layout);
nlohmann::ordered_json to_json(const PlanReport& report, bool layout);

std::string to_text(const SearchResult& result, const Hardware& hardware);
nlohmann::ordered_json to_json(const SearchResult& result);

}  // namespace optimus
