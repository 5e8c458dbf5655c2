#include "optimus/cli/ranks.h"

#include <omp.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "optimus/base/error.h"

namespace optimus {
namespace {

// A rank's threads = the cores that it may run on / the ranks that may run on the same ones. OMP_NUM_THREADS overrides.
void share_cores(Processes& processes) {
  if (processes.size() == 1 || std::getenv("OMP_NUM_THREADS")) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  sched_getaffinity(0, sizeof cores, &cores);
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  std::string mine(reinterpret_cast<const char*>(&cores), sizeof cores);
  mine += host;
  mine.resize(sizeof cores + sizeof host);
  std::string all;
  for (const std::string& text : processes.gather(mine)) all += text;
  all = processes.broadcast(all, 0);
  int sharers = 0;
  for (size_t at = 0; at < all.size(); at += mine.size()) sharers += all.compare(at, mine.size(), mine) == 0;
  omp_set_num_threads(std::max(1, omp_get_num_procs() / sharers));
}

}  // namespace

int report_error(const std::string& who) {
  try {
    throw;
  } catch (const Error& error) {
    fmt::print(stderr, "{}: error: {}\n", who, error.what());
    return int(error.kind());
  } catch (const std::filesystem::filesystem_error& error) {
    fmt::print(stderr, "{}: error: {}\n", who, error.what());
    return int(ErrorKind::kData);
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "{}: error: out of memory; a smaller train.micro_batch or model.sequence needs less\n", who);
    return int(ErrorKind::kMemory);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}: internal error: {}\n", who, error.what());
    return 70;
  }
}

int run_on_ranks(const std::function<int(Processes&)>& work) {
  const std::shared_ptr<Processes> processes = start_processes();
  try {
    share_cores(*processes);
    return work(*processes);
  } catch (...) {
    if (processes->size() == 1) throw;
    // Most errors are the same everywhere, and the first rank's abort() ends the others while they wait here.
    if (processes->rank() != 0) std::this_thread::sleep_for(std::chrono::seconds(2));
    const std::string who =
        processes->rank() == 0 ? std::string("optimus") : fmt::format("optimus: rank {}", processes->rank());
    processes->abort(report_error(who));
  }
  return 70;  // not reached
}

}  // namespace optimus
