// optimus generate CHECKPOINT --prompt TEXT [--tokens N] [--temperature T] [--top-p P] [--seed S]
#include <algorithm>
#include <cmath>
#include <cstdio>

#include <CLI/CLI.hpp>

#include "optimus/checkpoint/run_folder.h"
#include "optimus/cli/commands.h"
#include "optimus/cli/options.h"
#include "optimus/train/inference.h"
#include "optimus/train/sampling.h"

namespace optimus {
namespace {

struct GenerateOptions {
  std::string checkpoint, prompt, device = "auto";
  int64_t tokens = 200;
  SamplingConfig sampling;
};

void generate(const GenerateOptions& options) {
  require(std::isfinite(options.sampling.temperature) && std::isfinite(options.sampling.top_p), ErrorKind::kUsage,
          "--temperature and --top-p must be finite");
  Inference inference(resolve_checkpoint(options.checkpoint), EngineUse::generation, options.device, 1);
  const Tokenizer& tokenizer = inference.tokenizer();
  const ModelConfig& model = inference.config().model;
  require(model.vocab >= tokenizer.vocab(), ErrorKind::kUsage,
          "{} has a vocabulary of {} tokens, its tokenizer {}; generating text needs the model's own tokenizer",
          options.checkpoint, model.vocab, tokenizer.vocab());

  std::vector<int32_t> text = tokenizer.encode(options.prompt);
  if (text.empty()) text.push_back(tokenizer.end_of_document());  // what stands before every document's first token
  std::fputs(options.prompt.c_str(), stdout);
  int64_t cached = 0;  // tokens of `text` from `start` on that the caches hold
  size_t start = 0;
  for (int64_t i = 0; i < options.tokens; ++i) {
    if (int64_t(text.size() - start) > model.sequence) {
      // The window is full: go on from its second half.
      start = text.size() - size_t(std::max<int64_t>(1, model.sequence / 2));
      cached = 0;
      inference.engine().reset_caches();
    }
    const std::vector<int32_t> fresh(text.begin() + ptrdiff_t(start) + cached, text.end());
    std::vector<float> logits = inference.engine().decode_wait(fresh);
    cached += int64_t(fresh.size());
    require(std::all_of(logits.begin(), logits.end(), [](float logit) { return std::isfinite(logit); }),
            ErrorKind::kNumerical, "{}: the logits are not finite", options.checkpoint);
    logits.resize(size_t(tokenizer.vocab()));  // ids past it only pad the vocabulary
    const int32_t token = sample_token(options.sampling, logits, i);
    if (token == tokenizer.end_of_document()) break;
    text.push_back(token);
    std::fputs(tokenizer.decode({&token, 1}).c_str(), stdout);
    std::fflush(stdout);
  }
  std::fputc('\n', stdout);
}

}  // namespace

void add_generate(CLI::App& program) {
  const auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = program.add_subcommand("generate", "Continue a text");
  command->add_option("CHECKPOINT", options->checkpoint, "A step's folder, an imported folder or a run.dir")
      ->required();
  command->add_option("--prompt", options->prompt, "Text to continue")->required();
  command->add_option("--tokens", options->tokens, "Tokens to add")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_option("--temperature", options->sampling.temperature, "0: always the most likely token")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_option("--top-p", options->sampling.top_p, "Nucleus of that probability")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--seed", options->sampling.seed, "Of the random choices")->capture_default_str();
  add_device_option(*command, options->device);
  command->callback([options] { generate(*options); });
}

}  // namespace optimus
