// The one list of kernels. Each declaration is a contract (maths, shapes, element types, what is overwritten and what is
// added to); cpu/, cuda/ and dry/ implement it, and one table of cases in tests/ops checks them all against an fp64
// reference. "real" below means f32 or bf16, the same for all real tensors of a call unless said otherwise; arithmetic
// and accumulation are f32 at least.
//
// Rules for all:
//  - An implementation writes every element of its outputs, or never lets the rest be read.
//  - Results are deterministic: the same call with the same inputs gives the same bits.
//  - No host synchronisation; calls take effect in order on the stream the Ops object was made for.
//  - `addend`: y = f(...) + addend. It may be y itself (accumulate) or empty (overwrite), nothing else may overlap.
//  - Gradients of parameters are f32 or bf16 ("gradient type"); `Write` says whether they are set or added to.
//
// Shape letters: T tokens, D hidden, H query heads, G key/value heads, W head_dim, F expert or MLP width, V vocabulary,
// E experts, L local experts, K top_k, R routed rows, U balance units, B sequences, S positions.
#pragma once

#include <cstdint>
#include <memory>

#include "optimus/base/philox.h"
#include "optimus/tensor/arena.h"
#include "optimus/tensor/tensor.h"

namespace optimus {

enum class Write : uint8_t { overwrite, accumulate };
enum class Transpose : uint8_t { no, yes };
enum class NormKind : uint8_t { rms, layer };
enum class ScoreKind : uint8_t { softmax, sigmoid };
enum class RopeDirection : uint8_t { forward, backward };

/// Which rows belong to which expert (or destination rank) and to which token; made by Ops::route and
/// Ops::route_to_ranks, read by gather, combine and the grouped products. Rows are grouped by local expert, tokens
/// ascending inside each (K1..K3 of the Optimus paper).
struct RouteIndex {
  Tensor offsets_L1;         ///< i32 [L+1], non-decreasing, offsets[L] = number of routed rows R'
  Tensor token_R;            ///< i32 [R], row -> token
  Tensor slot_R;             ///< i32 [R], row -> flat (token, k) index t*K + k
  Tensor row_ptr_T1;         ///< i32 [T+1], token -> first entry of its row list (CSR)
  Tensor row_R;              ///< i32 [R], the rows of each token, k ascending
  double balanced_rows = 0;  ///< with perfectly balanced experts: what cost models count and kernels do not read
};

struct AttentionShape {
  int64_t sequences;  ///< B
  int64_t queries;    ///< positions per sequence in q
  int64_t keys;       ///< positions per sequence in k, v; >= queries when causal
  int64_t heads;      ///< H
  int64_t kv_heads;   ///< G, divides H; query head h reads kv head h / (H/G)
  int64_t head_dim;   ///< W; a GPU takes up to 256
  bool causal;        ///< query i sees keys 0 .. i + (keys - queries)
  float scale;        ///< scores are scale * q.k
};

struct RouterShape {
  int64_t top_k;
  ScoreKind score;
  bool normalize_top_k;     ///< gates divided by their sum over the chosen (plus 1e-20 for sigmoid)
  float score_scale;        ///< gates are multiplied by it
  int64_t groups;           ///< experts in this many equal groups; 1 = no groups
  int64_t top_groups;       ///< only experts of the best groups (sum of their two best selection scores) may be chosen
  int64_t tokens_per_unit;  ///< unit of token t: t / tokens_per_unit
};

/// Row of the control tensor (f32 [kControlSize]) that the optimizer's kernels read on the device.
enum ControlSlot : int { kLearningRate, kCorrection1, kCorrection2, kClip, kFinite, kGradientNorm, kControlSize };

struct AdamwConstants {
  float beta1, beta2, eps, weight_decay;
  // Of the stochastic rounding of bf16 moments; not read for f32 ones.
  Philox rounding{};
  uint64_t step = 0;
  int64_t first_index = 0;  ///< of the first element
};

class Ops {
 public:
  virtual ~Ops() = default;

  // ---- choices of algorithms ----
  /// Which of a library's algorithms are used where it offers several, as a text to keep; "" where there is nothing to choose
  /// or all is left to the library's own estimate. It holds for one kind of device and one version of the library.
  virtual std::string choices() const { return {}; }
  /// Takes what choices() gave; "" leaves all to the library again. False, and nothing changes, for a text of another device or
  /// library.
  virtual bool set_choices(const std::string& text) { return text.empty(); }
  /// From now on every product that is seen for the first time is timed with all algorithms, and the fastest is chosen. The host waits,
  /// and results mean nothing: for `optimus bench ops --tune` alone.
  virtual void start_tuning_wait() {}

  /// Memory of the device that the backend keeps for itself, besides what it is given.
  virtual int64_t fixed_bytes() const { return 0; }

  // ---- copies ----
  /// x = value, every element. Any type.
  virtual void fill(Tensor x, double value) = 0;
  /// to = from, converted between f32 and bf16 where they differ (round to nearest even); other types are alike. Any
  /// pitches.
  virtual void copy(Tensor from, Tensor to) = 0;
  /// y = a + b. real, any pitches; y may be a or b.
  virtual void add(Tensor a, Tensor b, Tensor y) = 0;
  /// x[i] = std * normal(generator, first_index + i, stream), see normal_at. real, contiguous.
  virtual void fill_normal(Tensor x, float std, const Philox& generator, uint64_t stream, int64_t first_index) = 0;

  // ---- products ----
  /// y[M,N] = op(a)[M,K] * op(b)[K,N] + addend. a, b real alike; y and addend f32 or bf16, alike.
  virtual void matmul(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend) = 0;
  /// Rows grouped by expert times each expert's matrix: y[r] = x[r] * w[e(r)]^T, e(r) from index.offsets (on the device).
  /// x [R,K], w [L,N,K], y [R,N]. Rows past offsets[L] are left untouched.
  virtual void grouped_matmul(Tensor x_RK, Tensor w_LNK, const RouteIndex& index, Tensor y_RN) = 0;
  /// The input gradient of it: dx[r] = dy[r] * w[e(r)]. Rows past offsets[L] are left untouched.
  virtual void grouped_matmul_input(Tensor dy_RN, Tensor w_LNK, const RouteIndex& index, Tensor dx_RK) = 0;
  /// The weight gradient of it: dw[e] (+)= dy[rows of e]^T * x[rows of e]. An expert without rows gets zeros (overwrite)
  /// or keeps its values (accumulate). dw has the gradient type.
  virtual void grouped_matmul_weight(Tensor dy_RN, Tensor x_RK, const RouteIndex& index, Tensor dw_LNK,
                                     Write write) = 0;

  // ---- embedding ----
  /// y[t] = w[ids[t]]. ids i32 [T], w real [V,D].
  virtual void embedding(Tensor ids_T, Tensor w_VD, Tensor y_TD) = 0;
  /// dw[ids[t]] += dy[t], in token order; tokens equal to `padding_token` (-1: none) contribute nothing. With
  /// overwrite dw is cleared first. A GPU takes up to 2 million tokens, less a quarter of the vocabulary.
  virtual void embedding_backward(Tensor ids_T, Tensor dy_TD, Tensor dw_VD, int64_t padding_token, Write write) = 0;

  // ---- normalisation ----
  /// Each row of x [T, groups*W] holds `groups` vectors of W = columns/groups, normalised one by one:
  ///   rms:   y = x * r * weight,              r = 1/sqrt(mean(x^2) + eps)
  ///   layer: y = (x - mean) * r * weight + bias, r = 1/sqrt(var + eps)
  /// plus addend. weight, bias real [W] or empty (1, 0). statistics f32 [T, groups*2] = (mean, r); mean is 0 for rms.
  /// y may be x or addend.
  virtual void norm(NormKind kind, float eps, int64_t groups, Tensor x, Tensor weight, Tensor bias, Tensor addend,
                    Tensor y, Tensor statistics) = 0;
  /// dx = (gradient through the normalisation) + addend; dweight (+)= sum_t dy * x_hat; dbias (+)= sum_t dy.
  /// dweight, dbias empty where the norm has none. dx may be dy.
  virtual void norm_backward(NormKind kind, int64_t groups, Tensor x, Tensor weight, Tensor statistics, Tensor dy,
                             Tensor addend, Tensor dx, Tensor dweight, Tensor dbias, Write write) = 0;

  // ---- attention ----
  /// Rotary embedding, half-split: of each head (W = columns/heads, even) the pair (i, i + W/2) is turned by
  /// positions[t] * theta^(-2i/W); `backward` turns the other way. x real [T, heads*W], in place into y (may be x).
  virtual void rope(Tensor x, Tensor positions_T, int64_t heads, float theta, RopeDirection direction, Tensor y) = 0;
  /// o = softmax(scale * q k^T) v. q, o [B*queries, H*W], k, v [B*keys, G*W], any pitches. lse f32 [B, H, queries] =
  /// log-sum-exp of the scaled scores, empty where no backward follows. No [queries, keys] matrix is kept.
  virtual void attention(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) = 0;
  /// dq, dk, dv are overwritten. `scratch` f32, contiguous, of at least attention_scratch_bytes().
  virtual void attention_backward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                                  Tensor do_, Tensor dq, Tensor dk, Tensor dv, Tensor scratch) = 0;
  /// For operands of type `dtype`; a multiple of 4. It depends on the backend's choice of a kernel.
  virtual int64_t attention_scratch_bytes(const AttentionShape& shape, DType dtype) const = 0;

  // ---- gated MLP ----
  /// a[r] = silu(h[r, :F]) * h[r, F:] * gate[r]; gate[r] = gates[slots[r]] or 1 when gates is empty.
  /// h [R,2F], a [R,F] real; gates f32 flat [T*K], slots i32 [R]; `rows` i32 [1] (device) bounds the rows, empty = all.
  virtual void swiglu(Tensor h_R2F, Tensor gates, Tensor slots, Tensor rows, Tensor a_RF) = 0;
  /// With da the gradient of the gated a: dh, the gated activation a again
  /// (for the down projection's weight gradient) and dgates[slots[r]] = sum_f silu(..)*h_up*da. a and dgates may be empty.
  /// dh [R,2F] may be h.
  virtual void swiglu_backward(Tensor h_R2F, Tensor da_RF, Tensor gates, Tensor slots, Tensor rows, Tensor dh_R2F,
                               Tensor a_RF, Tensor dgates) = 0;

  // ---- router ----
  /// Scores and choice. logits f32 [T,E]; bias f32 [E] or empty is added to the scores for selection only.
  /// probs f32 [T,E]: softmax, or sigmoid/sum(sigmoid) for ScoreKind::sigmoid. gates f32 [T,K]; ids i32 [T,K] by
  /// descending selection score, the lower id first among equals; lse f32 [T] = logsumexp(logits).
  virtual void router(const RouterShape& shape, Tensor logits_TE, Tensor bias_E, Tensor probs_TE, Tensor gates_TK,
                      Tensor ids_TK, Tensor lse_T) = 0;
  /// counts f32 [U,E] = slots of the unit's tokens that chose e; prob_sums f32 [U,E] = sum of probs over its tokens;
  /// z_sum f64 [1] += sum of lse^2.
  virtual void router_statistics(const RouterShape& shape, Tensor probs_TE, Tensor ids_TK, Tensor lse_T,
                                 Tensor counts_UE, Tensor prob_sums_UE, Tensor z_sum) = 0;
  /// dlogits of  sum_tk dgates*gates + sum_te balance[u(t),e]*probs + z_scale * sum_t lse^2, the choice held fixed.
  /// balance f32 [U,E] or empty.
  virtual void router_backward(const RouterShape& shape, Tensor logits_TE, Tensor probs_TE, Tensor gates_TK,
                               Tensor ids_TK, Tensor lse_T, Tensor dgates_TK, Tensor balance_UE, float z_scale,
                               Tensor dlogits_TE) = 0;
  /// The balance loss of one layer (or of all layers' summed counts) over `tokens` rows a unit:
  ///   loss[0] += scale * E * sum_u sum_e f*p,  f = counts/tokens or fixed_f [E] where given, p = prob_sums/tokens;
  ///   gradient[u,e] = gradient_scale * E * f / tokens  (the derivative by each prob). loss f64 [1].
  virtual void balance_loss(Tensor counts_UE, Tensor prob_sums_UE, Tensor fixed_f_E, double tokens, double scale,
                            double gradient_scale, Tensor loss, Tensor gradient_UE) = 0;

  // ---- dispatch ----
  /// Index of the (token, k) pairs whose expert lies in [first_expert, first_expert + L), L = offsets_L1's length - 1.
  /// Pairs are enumerated exactly once, in the order of rows; of that order the index describes the wave
  /// [first_row, first_row + R), R = token_R's length: rows are counted from first_row, offsets are clamped to [0, R],
  /// and a token's list holds its rows of the wave only. Pairs with other experts (ids < 0 among them) have no row.
  /// A GPU takes up to 2^30 pairs and 4,000 experts.
  virtual void route(Tensor ids_TK, int64_t first_expert, int64_t first_row, const RouteIndex& index) = 0;
  /// The same with destination ranks in place of experts, each token once a rank: rank p takes every token one of whose
  /// experts lies in [p*experts_per_rank, (p+1)*experts_per_rank). P = offsets_L1's length - 1 ranks; token_R holds at
  /// least T*min(K,P) rows; slot_R is not used.
  virtual void route_to_ranks(Tensor ids_TK, int64_t experts_per_rank, const RouteIndex& index) = 0;
  /// rows[r] = x[token[r]] for r < offsets[L]. x real or i32.
  virtual void gather_rows(Tensor x_TD, const RouteIndex& index, Tensor rows_RD) = 0;
  /// y[t] = sum of the token's rows (k ascending, f32) + addend[t]. rows, addend, y real alike.
  virtual void combine_rows(Tensor rows_RD, const RouteIndex& index, Tensor addend_TD, Tensor y_TD) = 0;

  // ---- loss ----
  /// loss[0] += sum_t weight[t] * (logsumexp(logits[t]) - logits[t, target[t]]); rows with weight 0 contribute nothing,
  /// whatever their target. Where scale != 0, logits are replaced by scale * weight[t] * (softmax - onehot).
  /// logits real [T,V]; targets i32 [T]; weights f32 [T]; loss f64 [1].
  virtual void cross_entropy(Tensor logits_TV, Tensor targets_T, Tensor weights_T, float scale, Tensor loss) = 0;

  // ---- optimizer ----
  /// out[0] += sum of x^2 in f64. x f32 or bf16, contiguous; out f64 [1].
  virtual void sum_squares(Tensor x, Tensor out) = 0;
  /// From squares f64 [1] (of all gradients) and loss f64 [1]: control[kGradientNorm] = sqrt(squares), control[kClip] =
  /// min(1, clip_norm/(norm + 1e-6)) (1 where clip_norm <= 0), control[kFinite] = 1 if both are finite, else 0.
  virtual void clip_control(Tensor squares, Tensor loss, float clip_norm, Tensor control) = 0;
  /// A f32 master as a bf16 weight and a 16-bit remainder, exactly, for every f32 that is not NaN: with b its bits as an
  /// integer, weight = (b + 0x8000) >> 16 (round to nearest, ties away from zero) and remainder = b - (weight << 16) in [-0x8000, 0x7FFF].
  /// master f32, weight bf16, remainder i16, all [n] contiguous.
  virtual void split_master(Tensor master, Tensor weight, Tensor remainder) = 0;
  /// The way back: master = the f32 whose bits are (weight << 16) + remainder.
  virtual void join_master(Tensor weight, Tensor remainder, Tensor master) = 0;
  /// AdamW as in PyTorch (decoupled decay first). With g = clip * gradient:
  ///   w -= lr*wd*w;  m = b1*m + (1-b1)*g;  v = b2*v + (1-b2)*g^2;  w -= lr * (m/c1) / (sqrt(v/c2) + eps)
  /// lr, c1 = 1 - b1^t, c2 = 1 - b2^t, clip and the finite flag from control; nothing changes when the flag is 0.
  /// gradient f32|bf16, all [n] contiguous. Either `weight` is f32 and master the same view, or `weight` is bf16 and
  /// `master` the i16 remainder of split_master(), which are then read and written together.
  /// m, v f32, or both bf16: then they are rounded stochastically, to the nearer neighbour with the greater probability:
  /// to f32's bits the low (m) or high (v) 16 bits of word i%4 of constants.rounding(i/4, step) are added and the lower half is
  /// dropped, i = first_index + position.
  virtual void adamw(const AdamwConstants& constants, Tensor control, Tensor gradient, Tensor master, Tensor m,
                     Tensor v, Tensor weight) = 0;
};

std::unique_ptr<Ops> make_cpu_ops();
/// For a device of make_cuda_device(), on its stream. `deterministic` false allows cuDNN kernels whose sums have no fixed
/// order. Error(kUsage) where cuDNN is older than the headers that the program was built with.
std::unique_ptr<Ops> make_cuda_ops(Device& device, bool deterministic);

}  // namespace optimus
