#include "optimus/model/norm.h"

namespace optimus {
namespace {

ParameterId add_vector(ParameterTable& table, const std::string& name, int64_t width, Init init, int64_t layer) {
  Parameter row;
  row.name = name;
  row.global = {width};
  row.init = init;
  row.layer = layer;
  return table.add(row);
}

}  // namespace

Norm::Norm(const ModelConfig& model, ParameterTable& table, const std::string& name, int64_t layer)
    : kind_(model.norm == "rms" ? NormKind::rms : NormKind::layer), eps_(model.norm_eps), groups_(1) {
  if (model.norm != "layer_nonparametric")
    weight_ = add_vector(table, name + ".weight", model.hidden, Init::ones, layer);
  if (model.norm == "layer") bias_ = add_vector(table, name + ".bias", model.hidden, Init::zeros, layer);
}

Norm::Norm(double eps, int64_t groups, int64_t width, ParameterTable& table, const std::string& name, int64_t layer)
    : kind_(NormKind::rms), eps_(eps), groups_(groups) {
  weight_ = add_vector(table, name + ".weight", width, Init::ones, layer);
}

}  // namespace optimus
