#include "optimus/tensor/cuda/cuda_device.h"

#include <cstring>

#include <nvtx3/nvToolsExt.h>

namespace optimus {
namespace cuda {

void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  const ErrorKind kind = status == cudaErrorMemoryAllocation ? ErrorKind::kMemory : ErrorKind::kCommunication;
  fail(kind, "the GPU failed: {} ({}) in {}", cudaGetErrorString(status), cudaGetErrorName(status), call);
}

bool has_kernels_for_current_device();  // architecture.cu

namespace {

/// An event on the compute stream.
class CudaMoment final : public Moment {
 public:
  explicit CudaMoment(cudaStream_t stream) { OPTIMUS_CUDA(cudaEventRecord(event_, stream)); }
  double seconds_since_wait(const Moment& earlier) const override {
    float milliseconds = 0;
    OPTIMUS_CUDA(cudaEventSynchronize(event_));
    OPTIMUS_CUDA(cudaEventElapsedTime(&milliseconds, dynamic_cast<const CudaMoment&>(earlier).event_, event_));
    return double(milliseconds) * 1e-3;
  }

 private:
  Event event_{cudaEventDefault};
};

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

// Number of GPUs; 0 where there is no driver or no GPU. One sentence where there is a driver that cannot serve.
int count_devices() {
  int devices = 0, driver = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status == cudaSuccess) return devices;
  cudaGetLastError();  // the error would be reported again by the next call
  cudaDriverGetVersion(&driver);
  if (driver == 0 || status == cudaErrorNoDevice) return 0;
  require(driver >= CUDART_VERSION / 1000 * 1000, ErrorKind::kUsage,
          "the NVIDIA driver on this machine is for CUDA {}, and this program needs CUDA {}: update the driver, or use "
          "run.device = \"cpu\"",
          version_text(driver), version_text(CUDART_VERSION));
  fail(ErrorKind::kUsage, "the GPUs of this machine cannot be used: {}. Mend that, or use run.device = \"cpu\"",
       cudaGetErrorString(status));
}

// A GPU that cannot be opened is a matter of the machine, not of a peer.
void open(int index) {
  const cudaError_t status = cudaSetDevice(index);
  if (status == cudaSuccess) return;
  fail(status == cudaErrorMemoryAllocation ? ErrorKind::kMemory : ErrorKind::kUsage,
       "GPU {} cannot be used: {}. Another process may hold it", index, cudaGetErrorString(status));
}

}  // namespace

CudaDevice::CudaDevice(int index)
    : index_([&] {
        const int devices = count_devices();
        require(index < devices, ErrorKind::kUsage, "GPU {} was asked for, but {}. Or use run.device = \"cpu\"", index,
                devices == 0 ? "this machine shows no GPU: it has no NVIDIA driver, or no card that it knows"
                             : fmt::format("this machine shows {}: start fewer ranks on it", devices));
        open(index);
        return index;
      }()) {
  cudaDeviceProp properties;
  OPTIMUS_CUDA(cudaGetDeviceProperties(&properties, index));
  multiprocessors_ = properties.multiProcessorCount;
  architecture_ = properties.major * 10 + properties.minor;
  require(has_kernels_for_current_device(), ErrorKind::kUsage,
          "GPU {} is a {} of compute capability {}.{}, and this program was built for {}: build it with "
          "-DOPTIMUS_CUDA_ARCHITECTURES={}{}",
          index, properties.name, properties.major, properties.minor, OPTIMUS_CUDA_ARCHITECTURES, architecture_,
          architecture_ == 90 ? "a" : "");
  OPTIMUS_CUDA(cudaMallocHost(reinterpret_cast<void**>(&staging_), size_t(kStagingBytes)));
}

CudaDevice::~CudaDevice() { cudaFreeHost(staging_); }

void* CudaDevice::allocate(int64_t bytes) {
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, size_t(std::max<int64_t>(bytes, 1)));
  require(status != cudaErrorMemoryAllocation, ErrorKind::kMemory, "GPU {} refused {:.2f} GiB of memory", index_,
          double(bytes) / 0x1p30);
  check(status, "cudaMalloc");
  return data;
}

// By multiprocessor, from the data sheets of A100 (312 TFLOP/s, 108 of them) and of H100 and H200 (989, 132).
double CudaDevice::peak_flops() const {
  switch (architecture_) {
    case 80: return 312e12 / 108 * multiprocessors_;
    case 90: return 989e12 / 132 * multiprocessors_;
    default: return 0;
  }
}

std::string CudaDevice::identity() const {
  cudaDeviceProp properties;
  OPTIMUS_CUDA(cudaGetDeviceProperties(&properties, index_));
  return {properties.uuid.bytes, sizeof properties.uuid.bytes};
}

int64_t CudaDevice::capacity() const {
  constexpr int64_t kModules = int64_t(256) << 20;
  size_t free = 0, total = 0;
  OPTIMUS_CUDA(cudaMemGetInfo(&free, &total));
  return std::max<int64_t>(int64_t(free) - kModules, 1);
}

int64_t CudaDevice::used_bytes() const {
  size_t free = 0, total = 0;
  OPTIMUS_CUDA(cudaMemGetInfo(&free, &total));
  return int64_t(total - free);
}

void CudaDevice::release(void* data, int64_t) { cudaFree(data); }

void CudaDevice::from_host(Tensor to, const void* from) {
  const int64_t bytes = to.bytes();
  if (bytes == 0) return;
  if (bytes > kStagingBytes) {
    OPTIMUS_CUDA(cudaMemcpyAsync(to.data, from, size_t(bytes), cudaMemcpyHostToDevice, stream_));
    OPTIMUS_CUDA(cudaStreamSynchronize(stream_));
    return;
  }
  if (staged_ + bytes > kStagingBytes) {  // the ring begins anew when what it held has arrived
    OPTIMUS_CUDA(cudaStreamSynchronize(stream_));
    staged_ = 0;
  }
  std::memcpy(staging_ + staged_, from, size_t(bytes));
  OPTIMUS_CUDA(cudaMemcpyAsync(to.data, staging_ + staged_, size_t(bytes), cudaMemcpyHostToDevice, stream_));
  staged_ += (bytes + 63) / 64 * 64;
}

void CudaDevice::to_host_wait(void* to, Tensor from) {
  if (from.bytes() == 0) return;
  OPTIMUS_CUDA(cudaMemcpyAsync(to, from.data, size_t(from.bytes()), cudaMemcpyDeviceToHost, stream_));
  OPTIMUS_CUDA(cudaStreamSynchronize(stream_));
}

void CudaDevice::timeline(std::string_view name) {
  if (in_range_) nvtxRangePop();
  in_range_ = !name.empty();
  if (in_range_) nvtxRangePushA(std::string(name).c_str());
}

void CudaDevice::synchronise_wait() { OPTIMUS_CUDA(cudaStreamSynchronize(stream_)); }

std::unique_ptr<Moment> CudaDevice::moment() { return std::make_unique<CudaMoment>(stream_); }

CudaDevice& as_cuda(Device& device) {
  auto* cuda = dynamic_cast<CudaDevice*>(&device);
  expects(cuda != nullptr, "a GPU's kernels were asked to run on another device");
  return *cuda;
}

}  // namespace cuda

std::unique_ptr<Device> make_cuda_device(int index) { return std::make_unique<cuda::CudaDevice>(index); }

int cuda_devices() { return cuda::count_devices(); }

}  // namespace optimus
