#include "optimus/model/parameter_table.h"

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
  parameter.offset = elements_;
  elements_ += (parameter.local.elements() + kAlignment - 1) / kAlignment * kAlignment;
  by_name_.emplace(parameter.name, ParameterId(rows_.size()));
  rows_.push_back(std::move(parameter));
  return ParameterId(rows_.size() - 1);
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
