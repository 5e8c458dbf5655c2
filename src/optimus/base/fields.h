// Plain structs to and from TOML. A struct names its keys once, in a template member
//
//   template <typename V> void fields(V& v) { v("layers", layers); v("norm", norm, {"rms", "layer"}); v.table("moe", moe); }
//
// and FieldReader, FieldWriter and whatever else needs the keys visit that list. Unknown keys, wrong types and values
// outside the allowed words are errors that name file, key, what was got and what is allowed.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <toml++/toml.h>

#include "optimus/base/error.h"

namespace optimus {

using Words = std::initializer_list<std::string_view>;

/// The word of `known` with the smallest edit distance, or "" when none is near.
std::string nearest_word(std::string_view word, const std::vector<std::string>& known);

/// Reads a TOML table into a struct; keys that are absent keep the struct's value.
class FieldReader {
 public:
  /// `file` and `path` ("model.moe") only serve messages.
  FieldReader(const toml::table& table, std::string file, std::string path)
      : table_(table), file_(std::move(file)), path_(std::move(path)) {}

  void operator()(std::string_view key, int64_t& value);
  void operator()(std::string_view key, double& value);
  void operator()(std::string_view key, bool& value);
  void operator()(std::string_view key, std::string& value);
  void operator()(std::string_view key, std::string& value, Words allowed);
  void operator()(std::string_view key, std::vector<std::string>& value);
  void operator()(std::string_view key, std::vector<int64_t>& value);
  template <typename T>
  void operator()(std::string_view key, std::optional<T>& value) {
    if (!find(key)) return;
    T inner{};
    (*this)(key, inner);
    value = inner;
  }

  template <typename S>
  void table(std::string_view key, S& section) {
    if (const toml::table* sub = find_table(key)) read_sub(*sub, key, section);
  }
  template <typename S>
  void table(std::string_view key, std::optional<S>& section) {
    const toml::table* sub = find_table(key);
    if (!sub) return;
    if (!section) section.emplace();
    read_sub(*sub, key, *section);
  }
  /// A key whose form the struct reads itself ("a list of paths or {path, weight}").
  const toml::node* raw(std::string_view key) { return find(key); }

  [[noreturn]] void wrong(std::string_view key, std::string_view expected) const;
  std::string path_of(std::string_view key) const {
    return path_.empty() ? std::string(key) : path_ + "." + std::string(key);
  }
  /// Call last: throws for the first key nobody asked for.
  void finish() const;

 private:
  const toml::node* find(std::string_view key);
  const toml::table* find_table(std::string_view key);
  template <typename S>
  void read_sub(const toml::table& sub, std::string_view key, S& section) {
    FieldReader reader(sub, file_, path_of(key));
    section.fields(reader);
    reader.finish();
  }

  const toml::table& table_;
  std::string file_, path_;
  std::vector<std::string> known_;
};

/// Writes a struct into a TOML table; unset optionals are left out.
class FieldWriter {
 public:
  explicit FieldWriter(toml::table& table) : table_(table) {}

  void operator()(std::string_view key, const int64_t& value) { table_.insert_or_assign(key, value); }
  void operator()(std::string_view key, const double& value) { table_.insert_or_assign(key, value); }
  void operator()(std::string_view key, const bool& value) { table_.insert_or_assign(key, value); }
  void operator()(std::string_view key, const std::string& value) { table_.insert_or_assign(key, value); }
  void operator()(std::string_view key, const std::string& value, Words) { table_.insert_or_assign(key, value); }
  template <typename T>
  void operator()(std::string_view key, const std::vector<T>& values) {
    toml::array array;
    for (const T& value : values) array.push_back(value);
    table_.insert_or_assign(key, std::move(array));
  }
  template <typename T>
  void operator()(std::string_view key, const std::optional<T>& value) {
    if (value) (*this)(key, *value);
  }
  template <typename S>
  void table(std::string_view key, S& section) {
    toml::table sub;
    FieldWriter writer(sub);
    section.fields(writer);
    table_.insert_or_assign(key, std::move(sub));
  }
  template <typename S>
  void table(std::string_view key, std::optional<S>& section) {
    if (section) table(key, *section);
  }
  void raw(std::string_view key, toml::array value) { table_.insert_or_assign(key, std::move(value)); }

 private:
  toml::table& table_;
};

}  // namespace optimus
