// Structs to and from TOML: what is read, what is refused and what the message says.
#include "optimus/base/fields.h"

#include <sstream>

#include <gtest/gtest.h>

namespace optimus::test {
namespace {

struct Inner {
  int64_t experts = 8;
  std::optional<double> coefficient;
  template <typename V>
  void fields(V& v) {
    v("experts", experts);
    v("coefficient", coefficient);
  }
};

struct Outer {
  int64_t layers = 2;
  double rate = 0.5;
  bool tied = false;
  std::string name = "none", norm = "rms";
  std::vector<std::string> scopes;
  std::vector<int64_t> stage_layers;
  std::optional<int64_t> heads;
  Inner inner;
  std::optional<Inner> moe;
  template <typename V>
  void fields(V& v) {
    v("layers", layers);
    v("rate", rate);
    v("tied", tied);
    v("name", name);
    v("norm", norm, {"rms", "layer"});
    v("scopes", scopes);
    v("stage_layers", stage_layers);
    v("heads", heads);
    v.table("inner", inner);
    v.table("moe", moe);
  }
};

Outer read(std::string_view text) {
  const toml::table table = toml::parse(text);
  Outer out;
  FieldReader reader(table, "run.toml", "");
  out.fields(reader);
  reader.finish();
  return out;
}

/// The message of the error that `text` must cause.
std::string refusal(std::string_view text) {
  try {
    read(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << text;
  return "";
}

void expect_words(const std::string& message, std::initializer_list<std::string_view> words) {
  for (std::string_view word : words)
    EXPECT_NE(message.find(word), std::string::npos) << word << " not in: " << message;
}

TEST(Fields, AbsentKeysKeepTheDefaults) {
  const Outer out = read("");
  EXPECT_EQ(out.layers, 2);
  EXPECT_EQ(out.norm, "rms");
  EXPECT_FALSE(out.heads);
  EXPECT_FALSE(out.moe);
  EXPECT_EQ(out.inner.experts, 8);
}

TEST(Fields, ReadsEveryType) {
  const Outer out = read(R"(
    layers = 1e3
    rate = 3
    tied = true
    name = "x"
    norm = "layer"
    scopes = ["experts", "attention"]
    stage_layers = [3, 2]
    heads = 16
    inner.experts = 4
    [moe]
    coefficient = 0.01)");
  EXPECT_EQ(out.layers, 1000);  // counts may be written as 1e3
  EXPECT_EQ(out.rate, 3);
  EXPECT_TRUE(out.tied);
  EXPECT_EQ(out.name, "x");
  EXPECT_EQ(out.norm, "layer");
  EXPECT_EQ(out.scopes, (std::vector<std::string>{"experts", "attention"}));
  EXPECT_EQ(out.stage_layers, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(out.heads, 16);
  EXPECT_EQ(out.inner.experts, 4);
  ASSERT_TRUE(out.moe);
  EXPECT_EQ(out.moe->experts, 8);
  EXPECT_EQ(out.moe->coefficient, 0.01);
}

TEST(Fields, UnknownKeysNameTheNearest) {
  expect_words(refusal("layer = 3"), {"run.toml", "unknown key layer", "did you mean layers?"});
  expect_words(refusal("[moe]\nexpert = 3"), {"moe.expert", "did you mean moe.experts?", "[moe]"});
  expect_words(refusal("zzzzzzzz = 3"), {"unknown key zzzzzzzz", "Known keys", "stage_layers"});
  EXPECT_EQ(refusal("zzzzzzzz = 3").find("did you mean"), std::string::npos);
}

TEST(Fields, WrongTypesNameKeyValueAndExpectation) {
  expect_words(refusal("layers = \"three\""), {"run.toml", "layers", "three", "an integer"});
  expect_words(refusal("layers = 1.5"), {"layers", "1.5", "an integer"});
  expect_words(refusal("layers = 1e30"), {"layers", "an integer"});
  expect_words(refusal("layers = nan"), {"layers", "an integer"});
  expect_words(refusal("rate = true"), {"rate", "a number"});
  expect_words(refusal("rate = inf"), {"rate", "a finite number"});
  expect_words(refusal("tied = 1"), {"tied", "true or false"});
  expect_words(refusal("name = 1"), {"name", "a string in quotes"});
  expect_words(refusal("scopes = \"experts\""), {"scopes", "a list of strings"});
  expect_words(refusal("scopes = [1]"), {"scopes", "a list of strings"});
  expect_words(refusal("stage_layers = [1, \"2\"]"), {"stage_layers", "a list of integers"});
  expect_words(refusal("heads = \"x\""), {"heads", "an integer"});
  expect_words(refusal("moe = 3"), {"moe", "a table"});
  expect_words(refusal("layers = {a = 1}"), {"layers", "a table", "an integer"});
  expect_words(refusal("moe.coefficient = \"x\""), {"moe.coefficient", "a number"});
}

TEST(Fields, AllowedWordsAreListed) {
  expect_words(refusal("norm = \"batch\""), {"norm", "batch", "\"rms\"", "\"layer\""});
}

TEST(Fields, WriterAndReaderRoundTrip) {
  Outer in = read(R"(
    layers = 7
    rate = 0.1
    name = "quoted \" and ünïcode"
    scopes = ["a"]
    stage_layers = []
    [moe]
    experts = 160)");
  toml::table table;
  FieldWriter writer(table);
  in.fields(writer);
  EXPECT_FALSE(table.contains("heads"));  // unset optionals are left out
  EXPECT_FALSE(table["moe"].as_table()->contains("coefficient"));
  std::ostringstream text;
  text << table;
  const Outer out = read(text.str());
  EXPECT_EQ(out.layers, 7);
  EXPECT_EQ(out.rate, 0.1);
  EXPECT_EQ(out.name, in.name);
  EXPECT_EQ(out.scopes, in.scopes);
  EXPECT_TRUE(out.stage_layers.empty());
  EXPECT_FALSE(out.heads);
  ASSERT_TRUE(out.moe);
  EXPECT_EQ(out.moe->experts, 160);
  EXPECT_EQ(out.inner.experts, 8);
}

TEST(Fields, NearestWord) {
  const std::vector<std::string> known = {"warmup_steps", "decay_steps", "lr"};
  EXPECT_EQ(nearest_word("warmup_step", known), "warmup_steps");
  EXPECT_EQ(nearest_word("decaysteps", known), "decay_steps");
  EXPECT_EQ(nearest_word("completely_different", known), "");
}

}  // namespace
}  // namespace optimus::test
