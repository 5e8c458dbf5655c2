#include "optimus/comm/together.h"

#include "optimus/base/error.h"

namespace optimus {

void together(Processes& processes, const std::function<void()>& work) {
  if (processes.size() == 1) return work();
  int kind = 0;
  std::string message;
  try {
    work();
  } catch (const Error& error) {
    kind = int(error.kind());
    message = error.what();
  } catch (const std::filesystem::filesystem_error& error) {
    kind = int(ErrorKind::kData);
    message = error.what();
  } catch (const std::bad_alloc&) {
    kind = int(ErrorKind::kMemory);
    message = fmt::format("rank {} is out of memory", processes.rank());
  }
  if (processes.max(kind) == 0) return;
  const std::vector<std::string> all = processes.gather(kind ? fmt::format("{}{}", char('0' + kind), message) : "");
  std::string first;
  for (size_t rank = 0; rank < all.size() && first.empty(); ++rank) first = all[rank];
  first = processes.broadcast(first, 0);
  throw Error(ErrorKind(first[0] - '0'), first.substr(1));
}

}  // namespace optimus
