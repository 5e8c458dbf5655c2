// How long computing waits for its communicators: what of communication is not hidden behind kernels, and what ranks wait
// for those that come later. Over MPI, whose waits add up what came, the sums, too. Only waits that are asked for count, not
// those of a transfer that is destroyed.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "optimus/comm/communicator.h"
#include "optimus/tensor/device.h"

namespace optimus {

class Waits {
 public:
  /// Seconds since the last call that the device's work stood still for transfers. Waits for the device.
  double take_wait();
  void add(std::unique_ptr<Moment> begin, std::unique_ptr<Moment> end) {
    spans_.emplace_back(std::move(begin), std::move(end));
  }

 private:
  std::vector<std::pair<std::unique_ptr<Moment>, std::unique_ptr<Moment>>> spans_;
};

/// `inner`, whose waits are added to `waits`. Both `device` and `waits` must outlive it. Barriers do not count.
std::unique_ptr<Communicator> make_timed_communicator(std::unique_ptr<Communicator> inner, Device& device,
                                                      Waits& waits);

}  // namespace optimus
