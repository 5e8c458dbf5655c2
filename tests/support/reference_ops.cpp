#include "support/reference_ops.h"

namespace optimus::test {

Values ReferenceOps::get(Tensor tensor) {
  Values out;
  const int64_t columns = tensor.columns();
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const std::byte* row = tensor.at_row(i / columns);
    out.push_back(detail::decode(tensor.dtype, row + (i % columns) * size_of(tensor.dtype)));
  }
  return out;
}

Indices ReferenceOps::get_indices(Tensor tensor) {
  const Values values = get(tensor);
  return Indices(values.begin(), values.end());
}

void ReferenceOps::put(Tensor tensor, const Values& values) {
  expects(int64_t(values.size()) <= tensor.elements(), "{} values for tensor {}", values.size(), tensor.shape);
  const int64_t columns = tensor.columns();
  for (int64_t i = 0; i < int64_t(values.size()); ++i)
    detail::encode(tensor.dtype, values[size_t(i)], tensor.at_row(i / columns) + (i % columns) * size_of(tensor.dtype));
}

reference::Route ReferenceOps::get_route(const RouteIndex& index) {
  reference::Route out;
  out.offsets = get_indices(index.offsets_L1);
  out.token = get_indices(index.token_R.slice(0, out.offsets.back()));
  out.row_ptr = get_indices(index.row_ptr_T1);
  return out;
}

void ReferenceOps::put_route(const RouteIndex& index, const reference::Route& route) {
  put(index.offsets_L1, to_values(route.offsets));
  put(index.token_R, to_values(route.token));
  put(index.slot_R, to_values(route.slot));
  put(index.row_ptr_T1, to_values(route.row_ptr));
  put(index.row_R, to_values(route.row));
}

void ReferenceOps::matmul(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend) {
  const int64_t k = ta == Transpose::no ? a.columns() : a.rows();
  put(y, plus(reference::matmul(get(a), ta, get(b), tb, y.rows(), y.columns(), k), addend));
}

void ReferenceOps::grouped_matmul(Tensor x, Tensor w, const RouteIndex& index, Tensor y) {
  put(y, reference::grouped_matmul(get(x), get(w), get_indices(index.offsets_L1), y.columns(), x.columns()));
}

void ReferenceOps::embedding(Tensor ids, Tensor w, Tensor y) {
  put(y, reference::embedding(get_indices(ids), get(w), w.columns()));
}

void ReferenceOps::norm(NormKind kind, float eps, int64_t groups, Tensor x, Tensor weight, Tensor bias, Tensor addend,
                        Tensor y, Tensor statistics) {
  const reference::NormShape shape{kind, double(eps), groups, x.columns() / groups};
  const reference::NormResult result =
      reference::norm(shape, get(x), weight ? get(weight) : Values{}, bias ? get(bias) : Values{});
  put(y, plus(result.y, addend));
  put(statistics, result.statistics);
}

void ReferenceOps::rope(Tensor x, Tensor positions, int64_t heads, float theta, RopeDirection direction, Tensor y) {
  put(y, reference::rope(get(x), get_indices(positions), heads, double(theta), direction));
}

void ReferenceOps::attention(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) {
  const reference::AttentionResult result = reference::attention(shape, get(q), get(k), get(v));
  put(o, result.o);
  if (lse) put(lse, result.lse);
}

void ReferenceOps::swiglu(Tensor h, Tensor gates, Tensor slots, Tensor rows, Tensor a) {
  const int64_t count = rows ? get_indices(rows)[0] : h.rows();
  Values gate_R(size_t(count), 1.0);
  if (gates) {
    const Values all = get(gates);
    const Indices slot = get_indices(slots);
    for (int64_t r = 0; r < count; ++r) gate_R[size_t(r)] = all[size_t(slot[size_t(r)])];
  }
  put(a, reference::swiglu(get(h.slice(0, count)), gate_R, a.columns()));
}

void ReferenceOps::router(const RouterShape& shape, Tensor logits, Tensor bias, Tensor probs, Tensor gates, Tensor ids,
                          Tensor lse) {
  const Values values = get(logits);
  if (!hold_)
    choices_.push_back(reference::router_choice(shape, values, bias ? get(bias) : Values{}, logits.columns()));
  const Indices& choice = hold_ ? choices_.at(call_++) : choices_.back();
  const reference::RouterResult result = reference::router(shape, values, choice, logits.columns());
  put(probs, result.probs);
  put(gates, result.gates);
  put(ids, to_values(choice));
  put(lse, result.lse);
}

void ReferenceOps::router_statistics(const RouterShape& shape, Tensor probs, Tensor ids, Tensor lse, Tensor counts,
                                     Tensor prob_sums, Tensor z_sum) {
  const int64_t E = probs.columns(), T = probs.rows();
  Values count(size_t(counts.elements())), sum(count.size());
  const Values p = get(probs), l = get(lse);
  const Indices id = get_indices(ids);
  double z = get(z_sum)[0];
  for (int64_t t = 0; t < T; ++t) {
    const int64_t unit = t / shape.tokens_per_unit;
    for (int64_t k = 0; k < shape.top_k; ++k) count[size_t(unit * E + id[size_t(t * shape.top_k + k)])] += 1;
    for (int64_t e = 0; e < E; ++e) sum[size_t(unit * E + e)] += p[size_t(t * E + e)];
    z += l[size_t(t)] * l[size_t(t)];
  }
  put(counts, count);
  put(prob_sums, sum);
  put(z_sum, {z});
}

void ReferenceOps::balance_loss(Tensor counts, Tensor prob_sums, Tensor fixed_f, double tokens, double scale, double,
                                Tensor loss, Tensor) {
  const Values f = get(counts), p = get(prob_sums);
  const Values fixed = fixed_f ? get(fixed_f) : Values{};
  const size_t E = size_t(counts.columns());
  double total = 0;
  for (size_t i = 0; i < f.size(); ++i) total += (fixed.empty() ? f[i] / tokens : fixed[i % E]) * p[i] / tokens;
  put(loss, {get(loss)[0] + scale * double(E) * total});
}

void ReferenceOps::route(Tensor ids, int64_t first_expert, int64_t first_row, const RouteIndex& index) {
  const reference::Route all =
      reference::route(get_indices(ids), ids.columns(), first_expert, index.offsets_L1.elements() - 1);
  put_route(index, reference::wave(all, first_row, index.token_R.elements()));
}

void ReferenceOps::route_to_ranks(Tensor ids, int64_t experts_per_rank, const RouteIndex& index) {
  put_route(index, reference::route_to_ranks(get_indices(ids), ids.columns(), experts_per_rank,
                                             index.offsets_L1.elements() - 1));
}

void ReferenceOps::gather_rows(Tensor x, const RouteIndex& index, Tensor rows) {
  put(rows, reference::gather_rows(get(x), get_route(index), x.columns()));
}

void ReferenceOps::combine_rows(Tensor rows, const RouteIndex& index, Tensor addend, Tensor y) {
  const reference::Route route = get_route(index);
  put(y, plus(reference::combine_rows(get(rows.slice(0, route.offsets.back())), route, rows.columns()), addend));
}

void ReferenceOps::cross_entropy(Tensor logits, Tensor targets, Tensor weights, float, Tensor loss) {
  put(loss, {get(loss)[0] + reference::cross_entropy(get(logits), get_indices(targets), get(weights)).loss});
}

}  // namespace optimus::test
