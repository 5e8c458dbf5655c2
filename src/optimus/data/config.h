// The [data] section.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "optimus/base/fields.h"

namespace optimus {

struct DataSource {
  std::string path;              ///< token file, with or without its ending
  std::optional<double> weight;  ///< share of the samples; either every source has one or none has

  bool operator==(const DataSource&) const = default;
};

struct DataConfig {
  std::vector<DataSource> train;
  std::vector<DataSource> valid;
  std::string format = "auto";
  std::string tokenizer = "byte";
  bool shuffle = true;
  std::optional<int64_t> seed;  ///< of the order of samples; train.seed when absent

  bool operator==(const DataConfig&) const = default;

  template <typename V>
  void fields(V& v) {
    sources(v, "train", train);
    sources(v, "valid", valid);
    v("format", format, {"auto", "npy", "raw_u16", "raw_u32", "megatron"});
    v("tokenizer", tokenizer);
    v("shuffle", shuffle);
    v("seed", seed);
  }

 private:
  static void sources(FieldReader& reader, std::string_view key, std::vector<DataSource>& list);
  static void sources(FieldWriter& writer, std::string_view key, const std::vector<DataSource>& list);
};

}  // namespace optimus
