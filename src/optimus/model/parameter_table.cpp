#include "optimus/model/parameter_table.h"

#include <numeric>

namespace optimus {

ParameterId ParameterTable::add(Parameter parameter) {
  expects(find(parameter.name) < 0, "parameter {} is listed twice", parameter.name);
  if (parameter.boxes.empty()) {
    Shape begin = parameter.global;
    for (int i = 0; i < begin.rank(); ++i) begin[i] = 0;
    parameter.boxes.push_back({begin, parameter.global});
  }
  parameter.local = parameter.boxes[0].size;
  for (size_t i = 1; i < parameter.boxes.size(); ++i) parameter.local[0] += parameter.boxes[i].size[0];
  by_name_.emplace(parameter.name, ParameterId(rows_.size()));
  rows_.push_back(std::move(parameter));
  return ParameterId(rows_.size() - 1);
}

void ParameterTable::lay_out(int64_t replicated_ranks, int64_t expert_ranks) {
  const auto rounded = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
  std::vector<ParameterId> order(rows_.size());
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](ParameterId id) { return std::pair(rows_[size_t(id)].layer, rows_[size_t(id)].cls); };
  std::stable_sort(order.begin(), order.end(), [&](ParameterId a, ParameterId b) { return key(a) < key(b); });

  buckets_.clear();
  elements_ = 0;
  const auto close = [&] {
    if (buckets_.empty()) return;
    Bucket& bucket = buckets_.back();
    const int64_t ranks = bucket.cls == ParameterClass::expert ? expert_ranks : replicated_ranks;
    bucket.count = rounded(elements_ - bucket.begin, std::lcm(kAlignment, ranks * kShardAlignment));
    elements_ = bucket.begin + bucket.count;
  };
  for (ParameterId id : order) {
    Parameter& row = rows_[size_t(id)];
    if (buckets_.empty() || std::pair(buckets_.back().layer, buckets_.back().cls) != key(id)) {
      close();
      buckets_.push_back({row.layer, row.cls, row.tied_copy, elements_, 0});
    }
    row.offset = elements_;
    elements_ += rounded(row.local.elements(), kAlignment);
  }
  close();
  by_offset_ = std::move(order);
}

std::vector<RowRange> ParameterTable::rows_in(int64_t begin, int64_t count) const {
  std::vector<RowRange> ranges;
  for (ParameterId id : by_offset_) {
    const Parameter& row = (*this)[id];
    const int64_t first = std::max(begin, row.offset);
    const int64_t last = std::min(begin + count, row.offset + row.local.elements());
    if (first < last) ranges.push_back({id, first - row.offset, last - first, first});
  }
  return ranges;
}

ParameterId ParameterTable::add_normal(std::string name, Shape shape, double std, int64_t layer, ParameterClass cls) {
  Parameter row;
  row.name = std::move(name);
  row.global = shape;
  row.cls = cls;
  row.init_std = std;
  row.layer = layer;
  return add(std::move(row));
}

ParameterId ParameterTable::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? -1 : found->second;
}

int64_t ParameterTable::count() const {
  int64_t n = 0;
  for (const Parameter& row : rows_) n += row.global.elements();
  return n;
}

int64_t ParameterTable::count(ParameterClass cls) const {
  int64_t n = 0;
  for (const Parameter& row : rows_)
    if (row.cls == cls) n += row.global.elements();
  return n;
}

Tensor ParameterTable::view(Tensor flat, ParameterId id) const {
  const Parameter& row = (*this)[id];
  return flat.slice(row.offset, row.local.elements()).reshape(row.local);
}

}  // namespace optimus
