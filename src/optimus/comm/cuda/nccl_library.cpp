#include "optimus/comm/cuda/nccl_library.h"

#include "optimus/base/error.h"
#include "optimus/base/log.h"

namespace optimus::cuda {
namespace {

/// ncclCommSplit came with 2.18, in a first form.
constexpr int kOldest = NCCL_VERSION(2, 19, 0);

/// NCCL_VERSION() backwards: up to 2.8 the minor version had one digit.
int major_of(int version) { return version < 10000 ? version / 1000 : version / 10000; }
std::string text_of(int version) {
  const int minor = version < 10000 ? version / 100 % 10 : version / 100 % 100;
  return fmt::format("{}.{}.{}", major_of(version), minor, version % 100);
}

}  // namespace

Nccl::Nccl() {
  const Library library("libnccl.so.2", "NVIDIA's NCCL, for communication between GPUs");
  // First the version: an old library also lacks functions.
  library.find("ncclGetVersion", ncclGetVersion);
  int version = 0;
  const ncclResult_t result = ncclGetVersion(&version);
  require(result == ncclSuccess, ErrorKind::kUsage, "{} does not tell its version: ncclGetVersion: error {}",
          library.path(), int(result));
  require(
      version >= kOldest && major_of(version) == NCCL_MAJOR, ErrorKind::kUsage,
      "{} is NCCL {}, and this program needs NCCL {} or a newer {}.x: put the folder of such a libnccl.so.2 first in "
      "LD_LIBRARY_PATH, or use run.device = \"cpu\"",
      library.path(), text_of(version), text_of(kOldest), NCCL_MAJOR);
  OPTIMUS_NCCL_FUNCTIONS(OPTIMUS_FIND_IN_LIBRARY)
  log().debug("NCCL {} ({}), built for NCCL {}", text_of(version), library.path(), text_of(NCCL_VERSION_CODE));
}

const Nccl& nccl() {
  static const Nccl functions;
  return functions;
}

}  // namespace optimus::cuda
