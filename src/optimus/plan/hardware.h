// What a kind of machine can do, read from hardware/NAME.toml. Every number is a table of a value in SI units and where
// it comes from, so that a prediction's assumptions can be read beside it:
//
//   matmul = { value = 680e12, source = "measured: ..." }
#pragma once

#include <string>
#include <vector>

namespace optimus {

struct Rate {
  double value = 0;    ///< > 0
  std::string source;  ///< never empty; begins with "assumed: " where nobody has measured it

  template <typename V>
  void fields(V& v) {
    v("value", value);
    v("source", source);
  }
};

struct Hardware {
  std::string name;
  Rate device_bytes;      ///< memory of a device, bytes
  Rate context;           ///< of which the driver's context, modules and libraries take this much
  Rate communicator;      ///< and each communicator of several ranks this much, bytes
  Rate messages;          ///< messages of a pipeline, and those of an all-to-all, this much again, bytes
  Rate devices_per_node;  ///< ranks of a node, neighbours in rank order

  // FLOP/s of bf16 products.
  Rate peak;                ///< the data sheet's, behind MFU
  Rate matmul;              ///< reached by dense products
  Rate grouped_matmul;      ///< reached by grouped products with very many rows an expert,
  Rate grouped_rows;        ///< and how many rows an expert reach half of that
  Rate attention;           ///< causal, half the square counted
  Rate attention_backward;  ///< twice the forward's FLOPs counted

  Rate memory;  ///< bytes/s, read and written
  Rate launch;  ///< seconds between the end of a kernel and the next one's full speed

  // A message or one step of a collective takes its link's latency; a collective also takes time to start.
  Rate collective_start;   ///< seconds
  Rate node_latency;       ///< seconds
  Rate node_bandwidth;     ///< bytes/s that a device sends to the others of its node, one way
  Rate network_latency;    ///< seconds
  Rate network_bandwidth;  ///< bytes/s that a device sends to other nodes, one way, while all of its node do

  template <typename V>
  void fields(V& v) {
    v("name", name);
    v.table("device_bytes", device_bytes);
    v.table("context", context);
    v.table("communicator", communicator);
    v.table("messages", messages);
    v.table("devices_per_node", devices_per_node);
    v.table("peak", peak);
    v.table("matmul", matmul);
    v.table("grouped_matmul", grouped_matmul);
    v.table("grouped_rows", grouped_rows);
    v.table("attention", attention);
    v.table("attention_backward", attention_backward);
    v.table("memory", memory);
    v.table("launch", launch);
    v.table("collective_start", collective_start);
    v.table("node_latency", node_latency);
    v.table("node_bandwidth", node_bandwidth);
    v.table("network_latency", network_latency);
    v.table("network_bandwidth", network_bandwidth);
  }
};

/// From TOML text; `file` serves messages. Error(kUsage) for unknown, missing and impossible rates and for one without
/// a source.
Hardware parse_hardware(const std::string& text, const std::string& file);

/// `name` is a path ending in .toml, or NAME.toml is looked for in $OPTIMUS_HARDWARE, in ./hardware and in
/// ../../hardware seen from the program. Error(kUsage) naming the places and what is there.
Hardware load_hardware(const std::string& name);

}  // namespace optimus
