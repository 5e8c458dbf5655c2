#include "optimus/base/log.h"

#include <spdlog/sinks/stdout_sinks.h>

namespace optimus {

spdlog::logger& log() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = spdlog::stderr_logger_mt("optimus");
    made->set_pattern("%v");
    return made;
  }();
  return *logger;
}

}  // namespace optimus
