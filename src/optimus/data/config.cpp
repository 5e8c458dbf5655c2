#include "optimus/data/config.h"

namespace optimus {

void DataConfig::sources(FieldReader& reader, std::string_view key, std::vector<DataSource>& list) {
  const toml::node* node = reader.raw(key);
  if (!node) return;
  const auto expected = "a path, or a list of paths or {path = \"...\", weight = 1.0}";
  auto read_one = [&](const toml::node& item) {
    DataSource source;
    if (item.is_string()) {
      source.path = item.as_string()->get();
    } else if (const toml::table* table = item.as_table()) {
      const auto path = (*table)["path"].value_exact<std::string>();
      source.weight = (*table)["weight"].value<double>();
      if (!path || (table->contains("weight") && !(source.weight && *source.weight > 0)) ||
          table->size() != 1 + size_t(source.weight.has_value()))
        reader.wrong(key, expected);
      source.path = *path;
    } else {
      reader.wrong(key, expected);
    }
    list.push_back(std::move(source));
  };
  list.clear();
  if (const toml::array* array = node->as_array())
    for (const toml::node& item : *array) read_one(item);
  else read_one(*node);
}

void DataConfig::sources(FieldWriter& writer, std::string_view key, const std::vector<DataSource>& list) {
  toml::array array;
  for (const DataSource& source : list) {
    if (source.weight) array.push_back(toml::table{{"path", source.path}, {"weight", *source.weight}});
    else array.push_back(source.path);
  }
  writer.raw(key, std::move(array));
}

}  // namespace optimus
