#include "optimus/comm/contracts.h"

#include <numeric>

namespace optimus {
namespace {

bool overlap(const Tensor& a, const Tensor& b) {
  const auto a_begin = reinterpret_cast<uintptr_t>(a.data), b_begin = reinterpret_cast<uintptr_t>(b.data);
  return a_begin < b_begin + uintptr_t(b.bytes()) && b_begin < a_begin + uintptr_t(a.bytes());
}

void check_contiguous(std::string_view operation, const Tensor& x) {
  expects(x.contiguous(), "{}: tensor {} has a pitch of {}, expected a contiguous one", operation, x.shape, x.pitch);
}

/// whole is size() pieces of part's length, and part lies outside of whole or is this rank's piece of it.
void check_pieces(const Communicator& group, std::string_view operation, const Tensor& whole, const Tensor& part) {
  check_contiguous(operation, whole);
  check_contiguous(operation, part);
  expects(whole.dtype == part.dtype, "{}: the whole is {}, the part {}", operation, name_of(whole.dtype),
          name_of(part.dtype));
  expects(whole.elements() == part.elements() * group.size(), "{}: a whole of {} elements and parts of {} for {} ranks",
          operation, whole.elements(), part.elements(), group.size());
  const std::byte* piece = static_cast<const std::byte*>(whole.data) + group.rank() * part.bytes();
  expects(part.data == piece || !overlap(whole, part),
          "{}: the part overlaps the whole, but is not the piece of rank {}", operation, group.rank());
}

/// The counts of one side of an all-to-all fit its tensor.
void check_rows(const Communicator& group, std::string_view side, const Tensor& x, std::span<const int64_t> rows) {
  check_contiguous("all_to_all", x);
  expects(x.shape.rank() >= 1, "all_to_all: the {} tensor has no dimension", side);
  expects(int64_t(rows.size()) == group.size(), "all_to_all: {} counts to {} for {} ranks", rows.size(), side,
          group.size());
  for (int64_t count : rows) expects(count >= 0, "all_to_all: {} rows to {}", count, side);
  const int64_t sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  expects(sum <= x.shape[0], "all_to_all: {} rows to {}, but its tensor is {}", sum, side, x.shape);
}

}  // namespace

int64_t row_bytes(const Tensor& x) {
  int64_t bytes = size_of(x.dtype);
  for (int i = 1; i < x.shape.rank(); ++i) bytes *= x.shape[i];
  return bytes;
}

void check_all_reduce(const Tensor& x) {
  check_contiguous("all_reduce", x);
  expects(x.dtype != DType::i64, "all_reduce: {} is not summed", name_of(x.dtype));
}

void check_broadcast(const Communicator& group, const Tensor& x, int root) {
  check_contiguous("broadcast", x);
  expects(root >= 0 && root < group.size(), "broadcast: root {} of {} ranks", root, group.size());
}

void check_reduce_scatter(const Communicator& group, const Tensor& whole, const Tensor& part, const Tensor& scratch) {
  check_pieces(group, "reduce_scatter", whole, part);
  expects(whole.dtype == DType::f32 || whole.dtype == DType::bf16, "reduce_scatter: {}, expected f32 or bf16",
          name_of(whole.dtype));
  if (!group.reduce_needs_scratch()) return;
  check_contiguous("reduce_scatter", scratch);
  expects(scratch.dtype == whole.dtype && scratch.elements() == whole.elements(),
          "reduce_scatter: scratch of {} {} for a whole of {} {}", scratch.elements(), name_of(scratch.dtype),
          whole.elements(), name_of(whole.dtype));
  expects(!overlap(scratch, whole) && !overlap(scratch, part), "reduce_scatter: the scratch overlaps whole or part");
}

void check_all_gather(const Communicator& group, const Tensor& part, const Tensor& whole) {
  check_pieces(group, "all_gather", whole, part);
}

void check_all_to_all(const Communicator& group, const Tensor& send, std::span<const int64_t> send_rows,
                      const Tensor& receive, std::span<const int64_t> receive_rows) {
  check_rows(group, "send", send, send_rows);
  check_rows(group, "receive", receive, receive_rows);
  const auto own = size_t(group.rank());
  expects(send_rows[own] == receive_rows[own], "all_to_all: rank {} sends itself {} rows and receives {}", group.rank(),
          send_rows[own], receive_rows[own]);
  expects(send.dtype == receive.dtype && row_bytes(send) == row_bytes(receive),
          "all_to_all: rows of {} {} are sent, of {} {} received", send.shape, name_of(send.dtype), receive.shape,
          name_of(receive.dtype));
  expects(!overlap(send, receive), "all_to_all: what is sent and what is received overlap");
}

void check_message(const Communicator& group, const Tensor& x, int peer) {
  check_contiguous("message", x);
  expects(peer >= 0 && peer < group.size() && peer != group.rank(), "message between rank {} and {} of a group of {}",
          group.rank(), peer, group.size());
}

}  // namespace optimus
