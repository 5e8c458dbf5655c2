#include "optimus/base/fields.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include <fmt/ranges.h>

namespace optimus {
namespace {

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row[b.size()];
}

std::string shown(const toml::node& node) {
  std::ostringstream out;
  node.visit([&](const auto& value) {
    if constexpr (toml::is_table<decltype(value)>) out << "a table";
    else if constexpr (toml::is_array<decltype(value)>) out << "an array";
    else out << value;
  });
  return out.str();
}

}  // namespace

std::string nearest_word(std::string_view word, const std::vector<std::string>& known) {
  std::string best;
  size_t best_distance = std::max<size_t>(2, word.size() / 2) + 1;
  for (const std::string& candidate : known) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) best_distance = distance, best = candidate;
  }
  return best;
}

const toml::node* FieldReader::find(std::string_view key) {
  if (std::find(known_.begin(), known_.end(), key) == known_.end()) known_.emplace_back(key);
  return table_.get(key);
}

const toml::table* FieldReader::find_table(std::string_view key) {
  const toml::node* node = find(key);
  if (!node) return nullptr;
  if (!node->is_table()) wrong(key, fmt::format("a table, [{}]", path_of(key)));
  return node->as_table();
}

void FieldReader::wrong(std::string_view key, std::string_view expected) const {
  const toml::node* node = table_.get(key);
  fail(ErrorKind::kUsage, "{}: {} = {} is not valid: expected {}", file_, path_of(key), node ? shown(*node) : "",
       expected);
}

void FieldReader::operator()(std::string_view key, int64_t& value) {
  const toml::node* node = find(key);
  if (!node) return;
  if (node->is_integer()) {
    value = node->as_integer()->get();
    return;
  }
  // 1e9 is how people write a count of tokens.
  const double number = node->is_floating_point() ? node->as_floating_point()->get() : NAN;
  if (!(std::floor(number) == number && std::abs(number) < 0x1p53)) wrong(key, "an integer");
  value = int64_t(number);
}

void FieldReader::operator()(std::string_view key, double& value) {
  const toml::node* node = find(key);
  if (!node) return;
  if (node->is_integer()) value = double(node->as_integer()->get());
  else if (node->is_floating_point()) value = node->as_floating_point()->get();
  else wrong(key, "a number");
  if (!std::isfinite(value)) wrong(key, "a finite number");
}

void FieldReader::operator()(std::string_view key, bool& value) {
  const toml::node* node = find(key);
  if (!node) return;
  if (!node->is_boolean()) wrong(key, "true or false");
  value = node->as_boolean()->get();
}

void FieldReader::operator()(std::string_view key, std::string& value) {
  const toml::node* node = find(key);
  if (!node) return;
  if (!node->is_string()) wrong(key, "a string in quotes");
  value = node->as_string()->get();
}

void FieldReader::operator()(std::string_view key, std::string& value, Words allowed) {
  std::string read = value;
  (*this)(key, read);
  if (!table_.get(key)) return;
  if (std::find(allowed.begin(), allowed.end(), read) == allowed.end())
    wrong(key, fmt::format("one of \"{}\"", fmt::join(allowed, "\", \"")));
  value = read;
}

void FieldReader::operator()(std::string_view key, std::vector<std::string>& value) {
  const toml::node* node = find(key);
  if (!node) return;
  if (!node->is_array()) wrong(key, "a list of strings");
  value.clear();
  for (const toml::node& item : *node->as_array()) {
    if (!item.is_string()) wrong(key, "a list of strings");
    value.push_back(item.as_string()->get());
  }
}

void FieldReader::operator()(std::string_view key, std::vector<int64_t>& value) {
  const toml::node* node = find(key);
  if (!node) return;
  if (!node->is_array()) wrong(key, "a list of integers");
  value.clear();
  for (const toml::node& item : *node->as_array()) {
    if (!item.is_integer()) wrong(key, "a list of integers");
    value.push_back(item.as_integer()->get());
  }
}

void FieldReader::finish() const {
  for (const auto& [key, node] : table_) {
    const std::string name(key.str());
    if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
    const std::string near = nearest_word(name, known_);
    const std::string where = path_.empty() ? "the file's top level" : "[" + path_ + "]";
    fail(ErrorKind::kUsage, "{}: unknown key {}{} Known keys of {}: {}", file_, path_of(name),
         near.empty() ? "." : fmt::format("; did you mean {}?", path_of(near)), where, fmt::join(known_, ", "));
  }
}

}  // namespace optimus
