// The GPU's implementation of ops.h. One source file an op family defines the methods of that family; contracts are in
// ops.h. Dense products are cuBLASLt's, attention is cuDNN's, grouped products are CUTLASS's where the operands allow
// it; own portable kernels do the rest, and everything in f32 (which never means TF32).
#pragma once

#include "optimus/ops/cuda/scratch.h"
#include "optimus/ops/ops.h"
#include "optimus/tensor/cuda/cuda_device.h"

namespace optimus::cuda {

class Matmuls;          // matmul.cpp
class CudnnAttention;   // cudnn_attention.cpp
struct GroupedKernels;  // hopper_grouped.h

class CudaOps final : public Ops {
 public:
  CudaOps(CudaDevice& device, bool deterministic);
  ~CudaOps() override;

  // cuda_ops.cpp
  std::string choices() const override;
  bool set_choices(const std::string& text) override;
  void start_tuning_wait() override { tuning_ = true; }
  int64_t fixed_bytes() const override { return kScratchBytes; }

  // elementwise.cu
  void fill(Tensor x, double value) override;
  void copy(Tensor from, Tensor to) override;
  void add(Tensor a, Tensor b, Tensor y) override;
  void fill_normal(Tensor x, float std, const Philox& generator, uint64_t stream, int64_t first_index) override;

  // matmul.cpp, grouped_matmul.cu
  void matmul(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend) override;
  void grouped_matmul(Tensor x_RK, Tensor w_LNK, const RouteIndex& index, Tensor y_RN) override;
  void grouped_matmul_input(Tensor dy_RN, Tensor w_LNK, const RouteIndex& index, Tensor dx_RK) override;
  void grouped_matmul_weight(Tensor dy_RN, Tensor x_RK, const RouteIndex& index, Tensor dw_LNK, Write write) override;

  // embedding.cu
  void embedding(Tensor ids_T, Tensor w_VD, Tensor y_TD) override;
  void embedding_backward(Tensor ids_T, Tensor dy_TD, Tensor dw_VD, int64_t padding_token, Write write) override;

  // norm.cu
  void norm(NormKind kind, float eps, int64_t groups, Tensor x, Tensor weight, Tensor bias, Tensor addend, Tensor y,
            Tensor statistics) override;
  void norm_backward(NormKind kind, int64_t groups, Tensor x, Tensor weight, Tensor statistics, Tensor dy,
                     Tensor addend, Tensor dx, Tensor dweight, Tensor dbias, Write write) override;

  // rope.cu, attention.cu
  void rope(Tensor x, Tensor positions_T, int64_t heads, float theta, RopeDirection direction, Tensor y) override;
  int64_t attention_scratch_bytes(const AttentionShape& shape, DType dtype) const override;
  void attention(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) override;
  void attention_backward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do_,
                          Tensor dq, Tensor dk, Tensor dv, Tensor scratch) override;

  // swiglu.cu
  void swiglu(Tensor h_R2F, Tensor gates, Tensor slots, Tensor rows, Tensor a_RF) override;
  void swiglu_backward(Tensor h_R2F, Tensor da_RF, Tensor gates, Tensor slots, Tensor rows, Tensor dh_R2F, Tensor a_RF,
                       Tensor dgates) override;

  // router.cu
  void router(const RouterShape& shape, Tensor logits_TE, Tensor bias_E, Tensor probs_TE, Tensor gates_TK,
              Tensor ids_TK, Tensor lse_T) override;
  void router_statistics(const RouterShape& shape, Tensor probs_TE, Tensor ids_TK, Tensor lse_T, Tensor counts_UE,
                         Tensor prob_sums_UE, Tensor z_sum) override;
  void router_backward(const RouterShape& shape, Tensor logits_TE, Tensor probs_TE, Tensor gates_TK, Tensor ids_TK,
                       Tensor lse_T, Tensor dgates_TK, Tensor balance_UE, float z_scale, Tensor dlogits_TE) override;
  void balance_loss(Tensor counts_UE, Tensor prob_sums_UE, Tensor fixed_f_E, double tokens, double scale,
                    double gradient_scale, Tensor loss, Tensor gradient_UE) override;

  // dispatch.cu
  void route(Tensor ids_TK, int64_t first_expert, int64_t first_row, const RouteIndex& index) override;
  void route_to_ranks(Tensor ids_TK, int64_t experts_per_rank, const RouteIndex& index) override;
  void gather_rows(Tensor x_TD, const RouteIndex& index, Tensor rows_RD) override;
  void combine_rows(Tensor rows_RD, const RouteIndex& index, Tensor addend_TD, Tensor y_TD) override;

  // loss.cu
  void cross_entropy(Tensor logits_TV, Tensor targets_T, Tensor weights_T, float scale, Tensor loss) override;

  // optimizer.cu
  void sum_squares(Tensor x, Tensor out) override;
  void clip_control(Tensor squares, Tensor loss, float clip_norm, Tensor control) override;
  void split_master(Tensor master, Tensor weight, Tensor remainder) override;
  void join_master(Tensor weight, Tensor remainder, Tensor master) override;
  void adamw(const AdamwConstants& constants, Tensor control, Tensor gradient, Tensor master, Tensor m, Tensor v,
             Tensor weight) override;

 private:
  CudaDevice& device_;
  cudaStream_t stream_;
  bool deterministic_;
  bool tuning_ = false;
  Scratch scratch_;  ///< of the op that is running
  std::unique_ptr<Matmuls> matmuls_;
  std::unique_ptr<GroupedKernels> grouped_;
  std::unique_ptr<CudnnAttention> cudnn_;
};

}  // namespace optimus::cuda
