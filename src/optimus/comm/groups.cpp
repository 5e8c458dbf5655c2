#include "optimus/comm/groups.h"

#include <functional>
#include <numeric>

namespace optimus {
namespace {

using Make = std::function<std::unique_ptr<Communicator>(const std::string& name, const std::vector<int>& ranks)>;

Groups make_groups_with(const MeshShape& shape, int rank, const Make& make) {
  std::vector<int> everyone(size_t(shape.world()));
  std::iota(everyone.begin(), everyone.end(), 0);
  Groups groups;
  groups.shape = shape;
  groups.place = place_of(shape, rank);
  groups.world = make("world", everyone);
  groups.dp = make("dp", dp_group(shape, rank));
  groups.ep = make("ep", ep_group(shape, rank));
  groups.edp = make("edp", edp_group(shape, rank));
  groups.pp = make("pp", pp_group(shape, rank));
  const bool edge = groups.place.pp == 0 || groups.place.pp == shape.pp - 1;
  if (shape.pp > 1 && edge) groups.embedding = make("embedding", embedding_group(shape, rank));
  return groups;
}

}  // namespace

Groups make_groups(Processes& processes, const MeshShape& shape, Device& device) {
  expects(processes.size() == shape.world(), "a mesh of {} ranks for {} processes", shape.world(), processes.size());
  return make_groups_with(shape, processes.rank(), [&](const std::string& name, const std::vector<int>& ranks) {
    if (device.kind() == DeviceKind::cuda)
      return make_nccl_communicator(processes, device, name, ranks,
                                    name == "pp" ? Messages::between_neighbours : Messages::none);
    return ranks.size() == 1 ? make_self_communicator() : processes.make_communicator(name, ranks);
  });
}

Groups make_dry_groups(const MeshShape& shape, int rank, std::vector<MessageRecord>& messages, DeviceKind kind) {
  return make_groups_with(shape, rank, [&](const std::string& name, const std::vector<int>& ranks) {
    const auto position = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    return ranks.size() == 1
               ? make_self_communicator()
               : make_dry_communicator(name, int(position), int(ranks.size()), messages, kind == DeviceKind::cpu);
  });
}

}  // namespace optimus
