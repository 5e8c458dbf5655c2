// How tokens meet their experts when the experts of a layer are spread over a group of ranks. A dispatcher brings tokens
// to the ranks of their experts (dispatch) and sums what comes back (combine); each is the other's backward:
//
//   forward    x, gates, ids  --dispatch-->  experts  --combine-->  y
//   backward   dy             --dispatch-->  experts  --combine-->  dx, dgates
//
// A rank takes tokens in waves of at most `capacity` tokens, so that memory is bounded whatever the router does. The
// number of waves is the same on all ranks of the group.
//
// T own tokens, N tokens of a wave, K top_k, P ranks of the group, C columns of whatever is moved.
#pragma once

#include <vector>

#include "optimus/ops/ops.h"

namespace optimus {

struct Context;

/// One micro-batch's exchange in one layer, made by begin() and kept from forward to backward.
struct DispatchPlan {
  int64_t waves = 1;
  int64_t capacity = 0;          ///< tokens of a wave at most
  RouteIndex send;               ///< own tokens by destination rank (alltoall)
  std::vector<int64_t> rows_PP;  ///< tokens that rank s sends to rank d: rows_PP[s*P + d] (alltoall)
};

class TokenDispatcher {
 public:
  virtual ~TokenDispatcher() = default;

  /// Whether the tokens are the rank's own: nothing is moved or copied, combine() does not occur.
  virtual bool local() const = 0;
  /// Tokens of a wave, at most, when every rank brings T.
  virtual int64_t capacity(int64_t tokens) const = 0;
  /// Whether all tokens fit one wave, however the router chooses.
  virtual bool one_wave(int64_t tokens) const = 0;

  /// After the router. What the plan keeps comes from c.saved. The host waits where counts are exchanged.
  virtual void begin(Context& c, Tensor ids_TK, DispatchPlan& plan) const = 0;
  /// N of the wave on this rank (a dry run: as many as there may be).
  virtual int64_t tokens(const DispatchPlan& plan, int64_t wave) const = 0;
  /// The wave's tokens' rows of x, allocated from `arena` (x itself when local). Any type.
  virtual Tensor dispatch(Context& c, const DispatchPlan& plan, int64_t wave, Tensor x_TC, Arena& arena) const = 0;
  /// y = addend + sum over ranks of part, each token's rows brought home. f32 or bf16; y may be addend.
  virtual void combine(Context& c, const DispatchPlan& plan, int64_t wave, Tensor part_NC, Tensor addend_TC,
                       Tensor y_TC) const = 0;
};

}  // namespace optimus
