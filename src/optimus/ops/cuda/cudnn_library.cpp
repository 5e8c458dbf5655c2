#include "optimus/ops/cuda/cudnn_library.h"

#include "optimus/base/error.h"
#include "optimus/base/log.h"

namespace optimus::cuda {

std::string cudnn_version_text(size_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

Cudnn::Cudnn() {
  // cuDNN opens it by this name when it first compiles a kernel, and gets the one that is open; were there none, it would
  // have no plan for any attention.
  const Library compiler("libnvrtc.so.13", "NVIDIA's NVRTC of CUDA 13, with which cuDNN compiles attention's kernels");
  const Library library("libcudnn.so.9", "NVIDIA's cuDNN 9, for attention on a GPU");
  // First the version: an old library may also lack functions.
  library.find("cudnnGetVersion", cudnnGetVersion);
  const size_t version = cudnnGetVersion();
  require(version >= CUDNN_VERSION, ErrorKind::kUsage,
          "{} is cuDNN {}, and this program was built for cuDNN {}: put the folder of a newer libcudnn.so.9 first in "
          "LD_LIBRARY_PATH, or use run.device = \"cpu\"",
          library.path(), cudnn_version_text(version), cudnn_version_text(CUDNN_VERSION));
  OPTIMUS_CUDNN_FUNCTIONS(OPTIMUS_FIND_IN_LIBRARY)
  const size_t cuda = cudnnGetCudartVersion();
  log().debug("cuDNN {} of CUDA {}.{} ({}), built for cuDNN {}", cudnn_version_text(version), cuda / 1000,
              cuda % 1000 / 10, library.path(), cudnn_version_text(CUDNN_VERSION));
}

const Cudnn& cudnn() {
  static const Cudnn functions;
  return functions;
}

}  // namespace optimus::cuda
