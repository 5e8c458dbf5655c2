#include "optimus/base/json.h"

#include <cstdint>
#include <sstream>

namespace optimus {
namespace {

using nlohmann::json;

json node_to_json(const toml::node& node) {
  return node.visit([](const auto& value) -> json {
    using Node = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_same_v<Node, toml::table>) {
      return to_json(value);
    } else if constexpr (std::is_same_v<Node, toml::array>) {
      json array = json::array();
      for (const toml::node& item : value) array.push_back(node_to_json(item));
      return array;
    } else if constexpr (toml::is_date<Node> || toml::is_time<Node> || toml::is_date_time<Node>) {
      std::ostringstream text;
      text << value;
      return text.str();
    } else {
      return value.get();
    }
  });
}

/// Where a converted value goes. Types of their own, not lambdas, because put_as_toml() calls itself through them.
struct IntoArray {
  toml::array& array;
  template <typename T>
  void operator()(T&& value) const {
    array.push_back(std::forward<T>(value));
  }
};
struct IntoTable {
  toml::table& table;
  const std::string& key;
  template <typename T>
  void operator()(T&& value) const {
    table.insert_or_assign(key, std::forward<T>(value));
  }
};

/// Calls `put` with the value as a TOML type; TOML has no null, so null is not put.
template <typename Put>
void put_as_toml(const json& value, const std::string& where, const Put& put) {
  switch (value.type()) {
    case json::value_t::object: put(to_toml(value, where)); break;
    case json::value_t::array: {
      toml::array array;
      for (const json& item : value) put_as_toml(item, where, IntoArray{array});
      put(std::move(array));
      break;
    }
    case json::value_t::string: put(value.get<std::string>()); break;
    case json::value_t::boolean: put(value.get<bool>()); break;
    case json::value_t::number_unsigned: put(natural_of(value, where)); break;
    case json::value_t::number_integer: put(value.get<int64_t>()); break;
    case json::value_t::number_float: put(value.get<double>()); break;
    default: break;
  }
}

}  // namespace

json parse_json(std::string_view text, const std::string& where) {
  const json::parser_callback_t bounded = [&](int depth, json::parse_event_t, json&) {
    require(depth <= kMaxJsonDepth, ErrorKind::kData, "{}: JSON nested deeper than {} levels", where, kMaxJsonDepth);
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), bounded);
  } catch (const json::exception& error) {
    fail(ErrorKind::kData, "{}: not valid JSON: {}", where, error.what());
  }
}

const json& member_of(const json& object, const std::string& key, const std::string& where) {
  require(object.is_object(), ErrorKind::kData, "{}: expected a JSON object with the key \"{}\", got {}", where, key,
          object.type_name());
  const auto found = object.find(key);
  require(found != object.end(), ErrorKind::kData, "{}: the key \"{}\" is missing", where, key);
  return *found;
}

std::string string_member(const json& object, const std::string& key, const std::string& where) {
  const json& value = member_of(object, key, where);
  require(value.is_string(), ErrorKind::kData, "{}: \"{}\" is {}, expected a string", where, key, value.type_name());
  return value.get<std::string>();
}

int64_t natural_of(const json& value, const std::string& where) {
  const bool natural = value.is_number_unsigned() ? value.get<uint64_t>() <= uint64_t(INT64_MAX)
                                                  : value.is_number_integer() && value.get<int64_t>() >= 0;
  require(natural, ErrorKind::kData, "{}: expected an integer in [0, 2^63), got {}", where,
          value.is_number() ? value.dump() : value.type_name());
  return value.get<int64_t>();
}

std::vector<int64_t> naturals_of(const json& value, const std::string& where) {
  require(value.is_array(), ErrorKind::kData, "{}: expected an array of integers, got {}", where, value.type_name());
  std::vector<int64_t> numbers;
  for (const json& item : value) numbers.push_back(natural_of(item, where));
  return numbers;
}

json to_json(const toml::table& table) {
  json object = json::object();
  for (const auto& [key, node] : table) object[std::string(key.str())] = node_to_json(node);
  return object;
}

toml::table to_toml(const json& object, const std::string& where) {
  require(object.is_object(), ErrorKind::kData, "{}: expected a JSON object, got {}", where, object.type_name());
  toml::table table;
  for (const auto& [key, value] : object.items()) put_as_toml(value, where, IntoTable{table, key});
  return table;
}

}  // namespace optimus
