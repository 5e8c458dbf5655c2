// JSON that comes from files: parsed with bounded nesting, read with checked types, and converted to and from the
// TOML tables that configuration structs (fields.h) visit. Errors are Error(kData) naming `where` (a file, say).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "optimus/base/fields.h"

namespace optimus {

/// Deeper nesting is refused: no file of ours needs it, and recursion over the value must not overflow the stack.
constexpr int kMaxJsonDepth = 64;

nlohmann::json parse_json(std::string_view text, const std::string& where);

/// The member `key` of an object; absent members and other kinds of value are errors.
const nlohmann::json& member_of(const nlohmann::json& object, const std::string& key, const std::string& where);
std::string string_member(const nlohmann::json& object, const std::string& key, const std::string& where);
/// An integer in [0, 2^63).
int64_t natural_of(const nlohmann::json& value, const std::string& where);
std::vector<int64_t> naturals_of(const nlohmann::json& value, const std::string& where);

/// Tables, arrays, strings, numbers and booleans one to one; dates become strings.
nlohmann::json to_json(const toml::table& table);
/// The inverse for objects; null members are left out.
toml::table to_toml(const nlohmann::json& object, const std::string& where);

/// A configuration struct as a JSON object.
template <typename S>
nlohmann::json section_to_json(S section) {
  toml::table table;
  FieldWriter writer(table);
  section.fields(writer);
  return to_json(table);
}

/// Reads a JSON object into a configuration struct. `file` and `path` ("model") serve messages.
template <typename S>
S section_from_json(const nlohmann::json& object, const std::string& file, const std::string& path) {
  const toml::table table = to_toml(object, file);
  S section;
  FieldReader reader(table, file, path);
  section.fields(reader);
  reader.finish();
  return section;
}

}  // namespace optimus
