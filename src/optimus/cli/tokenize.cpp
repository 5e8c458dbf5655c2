// optimus tokenize: text to a Megatron .bin/.idx pair. A text file is one document, a .jsonl file has one in each line.
// Inputs are mapped and encoded piece by piece, so their size does not matter.
#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "optimus/base/error.h"
#include "optimus/cli/commands.h"
#include "optimus/data/megatron.h"
#include "optimus/data/tokenizer.h"

namespace optimus {
namespace {

struct TokenizeOptions {
  std::string out;
  std::vector<std::string> inputs;
  std::string tokenizer = "byte";
  std::string field = "text";
};

class Corpus {
 public:
  Corpus(const Tokenizer& tokenizer, MegatronWriter& writer) : tokenizer_(tokenizer), writer_(writer) {}

  void add_document(std::string_view text) {
    tokenizer_.encode(text, [&](std::span<const int32_t> ids) { writer_.append(ids); });
    const int32_t end = tokenizer_.end_of_document();
    writer_.append({&end, 1});
    writer_.end_document();
  }

  /// One JSON object a line, the document in its `field`; empty lines are skipped.
  void add_json_lines(const fs::path& path, std::string_view text, const std::string& field) {
    for (int64_t number = 1; !text.empty(); ++number) {
      const size_t end = std::min(text.find('\n'), text.size());
      const std::string_view line = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
      const bool blank = line.find_first_not_of(" \t\r") == std::string_view::npos;
      if (!blank) add_document(document_of(line, path, number, field));
    }
  }

 private:
  static std::string document_of(std::string_view line, const fs::path& path, int64_t number,
                                 const std::string& field) {
    nlohmann::json object;
    try {
      object = nlohmann::json::parse(line);
    } catch (const nlohmann::json::exception& error) {
      fail(ErrorKind::kData, "{}:{}: not a JSON object: {}", path.string(), number, error.what());
    }
    const auto value = object.is_object() ? object.find(field) : object.end();
    require(value != object.end() && value->is_string(), ErrorKind::kData,
            "{}:{}: expected an object with a string \"{}\"; name the text's field with --field", path.string(), number,
            field);
    return std::move(value->get_ref<std::string&>());
  }

  const Tokenizer& tokenizer_;
  MegatronWriter& writer_;
};

void tokenize(const TokenizeOptions& options) {
  const auto tokenizer = make_tokenizer(options.tokenizer);
  if (const fs::path folder = fs::path(options.out).parent_path(); !folder.empty()) make_folder(folder);
  for (const std::string& input : options.inputs)
    for (const char* ending : {".bin", ".idx"}) {
      std::error_code absent;
      require(!fs::equivalent(input, megatron_prefix(options.out) + ending, absent), ErrorKind::kUsage,
              "--out {} would replace the input {}", options.out, input);
    }
  MegatronWriter writer(options.out, tokenizer->vocab());
  Corpus corpus(*tokenizer, writer);
  for (const std::string& input : options.inputs) {
    const MappedFile file(input);
    const std::string_view text(reinterpret_cast<const char*>(file.data()), size_t(file.size()));
    if (file.path().extension() == ".jsonl") corpus.add_json_lines(file.path(), text, options.field);
    else corpus.add_document(text);
  }
  writer.finish();
  const nlohmann::ordered_json summary{{"out", writer.prefix()},
                                       {"documents", writer.documents()},
                                       {"tokens", writer.tokens()},
                                       {"vocab", tokenizer->vocab()},
                                       {"dtype", name_of(writer.type())}};
  fmt::print("{}\n", summary.dump());
}

}  // namespace

void add_tokenize(CLI::App& program) {
  const auto options = std::make_shared<TokenizeOptions>();
  CLI::App* command = program.add_subcommand("tokenize", "Turn text into token files for training");
  command->add_option("--out", options->out, "Writes PREFIX.bin and PREFIX.idx")->required()->type_name("PREFIX");
  command->add_option("inputs", options->inputs, "Text files (a document each) and .jsonl files (a document a line)")
      ->required()
      ->type_name("INPUT");
  command->add_option("--tokenizer", options->tokenizer, "\"byte\"")->capture_default_str()->type_name("NAME");
  command->add_option("--field", options->field, "Where a .jsonl line has its text")
      ->capture_default_str()
      ->type_name("NAME");
  command->callback([options] { tokenize(*options); });
}

}  // namespace optimus
