// The token dispatchers (see model/token_dispatcher.h):
//
//   local      every rank holds all experts: nothing is moved
//   allgather  (Optimus) every rank of the group sees all tokens; partial outputs are reduce-scattered. Bytes do not
//              depend on the routing, nothing is counted, the host never waits. P - 1 copies of a token.
//   alltoall   one copy of a token to each rank that holds one of its experts; ranks tell each other how many come,
//              once a layer and micro-batch (the host waits for that). P q copies, q = 1 - C(E-L,K)/C(E,K).
#pragma once

#include <memory>
#include <string>

#include "optimus/comm/communicator.h"
#include "optimus/model/config.h"
#include "optimus/model/token_dispatcher.h"
#include "optimus/tensor/device.h"

namespace optimus {

std::unique_ptr<TokenDispatcher> make_local_dispatcher();
std::unique_ptr<TokenDispatcher> make_allgather_dispatcher(Communicator& ep);
/// A wave takes `moe_rows` times the tokens that balanced experts bring.
std::unique_ptr<TokenDispatcher> make_alltoall_dispatcher(Communicator& ep, Device& device, const MoeConfig& moe,
                                                          double moe_rows);

/// "local", "allgather" or "alltoall" for what the configuration asks ("auto": the one that moves fewer bytes a token).
std::string dispatcher_for(const std::string& asked, const MoeConfig& moe, int64_t ep);

/// Expected share of the group's ranks that a token goes to, with K of E experts drawn uniformly, L = E / ep on a rank:
/// q = 1 - C(E-L,K) / C(E,K).
double destination_share(const MoeConfig& moe, int64_t ep);

}  // namespace optimus
