#include "optimus/ops/cuda/cuda_ops.h"

#include <nlohmann/json.hpp>

#include "optimus/ops/cuda/cudnn_attention.h"
#include "optimus/ops/cuda/hopper_grouped.h"
#include "optimus/ops/cuda/matmul.h"

namespace optimus {
namespace cuda {

CudaOps::CudaOps(CudaDevice& device, bool deterministic)
    : device_(device),
      stream_(device.stream()),
      deterministic_(deterministic),
      scratch_(device),
      matmuls_(std::make_unique<Matmuls>(device)),
      grouped_(std::make_unique<GroupedKernels>()),
      cudnn_(std::make_unique<CudnnAttention>(device, deterministic)) {}

CudaOps::~CudaOps() = default;

// {"for": the device and library, "products": {product: place in the library's list}}
std::string CudaOps::choices() const {
  const Matmuls::Choices& products = matmuls_->choices();
  if (products.empty()) return {};
  return nlohmann::json{{"for", matmuls_->choices_header()}, {"products", products}}.dump();
}

bool CudaOps::set_choices(const std::string& text) {
  if (text.empty()) {
    matmuls_->set_choices({});
    return true;
  }
  const nlohmann::json table = nlohmann::json::parse(text, nullptr, false);
  if (!table.is_object() || table.value("for", "") != matmuls_->choices_header()) return false;
  try {
    matmuls_->set_choices(table.at("products").get<Matmuls::Choices>());
  } catch (const nlohmann::json::exception&) {
    return false;
  }
  return true;
}

int64_t CudaOps::attention_scratch_bytes(const AttentionShape& shape, DType dtype) const {
  return cuda::attention_scratch_bytes(shape, dtype, deterministic_);
}

}  // namespace cuda

std::unique_ptr<Ops> make_cuda_ops(Device& device, bool deterministic) {
  return std::make_unique<cuda::CudaOps>(cuda::as_cuda(device), deterministic);
}

}  // namespace optimus
