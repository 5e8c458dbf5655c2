// What every Communicator checks alike before anything moves, and the transfer that is over when it starts. A breach is
// a std::logic_error: the caller is wrong, not the transport, and the group stays usable.
#pragma once

#include "optimus/comm/communicator.h"

namespace optimus {

class FinishedTransfer final : public Transfer {
 public:
  void wait() override {}
};

/// The largest tag of a message between two ranks.
inline constexpr int kLargestTag = 1 << 20;

void check_all_reduce(const Tensor& x);
void check_broadcast(const Communicator& group, const Tensor& x, int root);
void check_reduce_scatter(const Communicator& group, const Tensor& whole, const Tensor& part, const Tensor& scratch);
void check_all_gather(const Communicator& group, const Tensor& part, const Tensor& whole);
void check_all_to_all(const Communicator& group, const Tensor& send, std::span<const int64_t> send_rows,
                      const Tensor& receive, std::span<const int64_t> receive_rows);
void check_message(const Communicator& group, const Tensor& x, int peer);

/// Bytes of one entry of the first dimension, which is what an all-to-all calls a row; also where there are no rows.
int64_t row_bytes(const Tensor& x);

}  // namespace optimus
