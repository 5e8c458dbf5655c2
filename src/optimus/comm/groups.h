// One rank's communicators, one a group of the mesh.
#pragma once

#include "optimus/comm/communicator.h"
#include "optimus/comm/mesh.h"
#include "optimus/comm/processes.h"
#include "optimus/tensor/device.h"

namespace optimus {

struct Groups {
  MeshShape shape;
  MeshPlace place;
  std::unique_ptr<Communicator> world;
  std::unique_ptr<Communicator> dp;         ///< reads other data, same stage
  std::unique_ptr<Communicator> ep;         ///< holds the other experts of the same layers
  std::unique_ptr<Communicator> edp;        ///< holds the same experts
  std::unique_ptr<Communicator> pp;         ///< the other stages
  std::unique_ptr<Communicator> embedding;  ///< first and last stage; empty on the others and without a pipeline
};

/// Groups over the memory of `device`, which must outlive them: NCCL's on GPUs, where only the pipeline's can send
/// messages; else MPI's. Collective over all processes, whose number is shape.world().
Groups make_groups(Processes& processes, const MeshShape& shape, Device& device);
/// The groups of one rank of a planned run on such devices.
Groups make_dry_groups(const MeshShape& shape, int rank, std::vector<MessageRecord>& messages,
                       DeviceKind kind = DeviceKind::cpu);

}  // namespace optimus
