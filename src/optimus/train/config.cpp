#include "optimus/train/config.h"

#include <numeric>
#include <sstream>

#include <toml++/toml.h>

#include "optimus/base/file.h"
#include "optimus/checkpoint/run_folder.h"
#include "optimus/data/tokenizer.h"
#include "optimus/model/stage.h"
#include "optimus/parallel/placements.h"
#include "optimus/parallel/schedule.h"

namespace optimus {
namespace {

constexpr auto kUsage = ErrorKind::kUsage;

toml::table parse_toml(const std::string& text, const std::string& name) {
  try {
    return toml::parse(text, name);
  } catch (const toml::parse_error& error) {
    fail(kUsage, "{}: line {}, column {}: {}", name, error.source().begin.line, error.source().begin.column,
         error.description());
  }
}

// "optimizer.lr=1e-3": the value is TOML where it parses as TOML, and a string otherwise.
void apply_override(toml::table& root, const std::string& text) {
  const size_t equals = text.find('=');
  require(equals != std::string::npos && equals > 0, kUsage, "--set {}: expected section.key=value", text);
  const std::string key = text.substr(0, equals), value = text.substr(equals + 1);
  toml::table* table = &root;
  size_t begin = 0;
  for (size_t dot; (dot = key.find('.', begin)) != std::string::npos; begin = dot + 1) {
    const std::string part = key.substr(begin, dot - begin);
    if (!table->get(part)) table->insert(part, toml::table{});
    table = table->get(part)->as_table();
    require(table != nullptr, kUsage, "--set {}: {} is not a section", text, key.substr(0, dot));
  }
  const std::string leaf = key.substr(begin);
  try {
    const toml::table parsed = toml::parse("value = " + value);
    if (parsed.size() == 1) {
      table->insert_or_assign(leaf, *parsed.get("value"));
      return;
    }
  } catch (const toml::parse_error&) {
  }
  table->insert_or_assign(leaf, value);
}

std::string default_run_dir(const std::string& name) { return (fs::path("runs") / fs::path(name).stem()).string(); }

// A checkpoint, or the newest of a run: of the model's shape its manifest is enough, whatever its tensors.
Checkpoint described_checkpoint(const std::string& path) {
  for (const fs::path& folder : step_folders(path)) {
    try {
      return Checkpoint(folder);
    } catch (const Error&) {
    }
  }
  return resolve_checkpoint(path);
}

// Where the model section starts from: a preset, the model of a checkpoint, or nothing.
ModelConfig base_model(toml::table& root, const std::string& name) {
  std::optional<ModelConfig> base;
  toml::table* model = root["model"].as_table();
  if (const auto* node = model ? model->get("preset") : nullptr) {
    require(node->is_string(), kUsage, "{}: model.preset must be a string in quotes", name);
    const std::string preset = node->as_string()->get();
    base = model_preset(preset);
    require(base.has_value(), kUsage,
            "{}: model.preset = \"{}\" is unknown; the presets are mula-1b, mula-7b-a1b, mula-20b-a2b, mula-100b-a7b, "
            "mula-220b-a10b",
            name, preset);
    model->erase("preset");
  }
  if (const auto from = root["train"]["init_from"].value_exact<std::string>(); from && !from->empty()) {
    require(!base, kUsage, "{}: model.preset and train.init_from cannot be given together", name);
    // A run that has begun no longer needs what it began from.
    const std::vector<fs::path> begun = step_folders(root["run"]["dir"].value_or(default_run_dir(name)));
    base = model_config_of(begun.empty() ? described_checkpoint(*from) : Checkpoint(begun.front()));
  }
  return base.value_or(ModelConfig{});
}

// Token ids are checked against model.vocab as they are read, so a vocabulary may have any size.
void resolve_model(RunConfig& config, const std::string& name) {
  const int64_t tokens = make_tokenizer(config.data.tokenizer)->vocab();
  if (config.model.vocab == 0) config.model.vocab = tokens;
  config.model.resolve(name);
}

// Keys given beside init_from may change how the model is trained, not what its weights are.
void check_same_tensors(const ModelConfig& base, const ModelConfig& model, const std::string& name) {
  const ParameterTable before = whole_table(base), now = whole_table(model);
  for (const Parameter& row : now.rows()) {
    const ParameterId id = before.find(row.name);
    require(
        id >= 0 && before[id].global == row.global, kUsage,
        "{}: the [model] keys given beside train.init_from change the tensor {} from {} to {}; leave out those that "
        "set its shape (hidden, heads, vocab, experts, width, ...)",
        name, row.name, id >= 0 ? before[id].global.text() : "absent", row.global);
  }
  require(before.rows().size() == now.rows().size(), kUsage,
          "{}: the [model] keys given beside train.init_from leave out tensors of its model", name);
}

void resolve_parallel(RunConfig& config, const std::string& name, int64_t ranks) {
  const ParallelConfig& parallel = config.parallel;
  for (const auto& [key, value] : {std::pair{"tp", parallel.tp}, {"cp", parallel.cp}, {"etp", parallel.etp}})
    require(value == 1, kUsage, "{}: parallel.{} = {} is not implemented yet; only 1 is. Use pp, ep and dp", name, key,
            value);
  for (const auto& [key, value] : {std::pair{"pp", parallel.pp}, {"ep", parallel.ep}})
    require(value >= 1 && value <= 1 << 20, kUsage, "{}: parallel.{} = {} must be at least 1", name, key, value);
  require(ranks != 1 || parallel.pp * parallel.ep == 1, kUsage,
          "{}: parallel.pp = {}, parallel.ep = {} need {} ranks or a multiple, but this is one process; start it with "
          "mpirun -n {}",
          name, parallel.pp, parallel.ep, parallel.pp * parallel.ep, parallel.pp * parallel.ep);
  if (config.model.moe && ranks > 0 && ranks % parallel.pp == 0) {
    const int64_t dp = ranks / parallel.pp, experts = config.model.moe->experts, both = std::gcd(dp, experts);
    require(both % parallel.ep == 0, kUsage,
            "{}: parallel.ep = {} must divide dp = {} ({} ranks / pp {}) and model.moe.experts = {}; the nearest that "
            "does is ep = {}",
            name, parallel.ep, dp, ranks, parallel.pp, experts, nearest_divisor(both, parallel.ep));
  }
  try {
    config.mesh = make_mesh_shape(ranks > 0 ? ranks : parallel.pp * parallel.ep, parallel.pp, parallel.ep);
  } catch (const Error& error) {
    fail(error.kind(), "{}: {}", name, error.what());
  }
  check_layout(config.model, parallel, config.mesh, name);
}

void resolve_train(RunConfig& config, const std::string& name, ConfigUse use) {
  TrainConfig& train = config.train;
  constexpr int64_t kLargestBatch = (int64_t(1) << 31) - 1;
  require(train.global_batch >= 1 && train.global_batch <= kLargestBatch, kUsage,
          "{}: train.global_batch = {} must lie between 1 and {}", name, train.global_batch, kLargestBatch);
  const int64_t dp = config.mesh.dp;
  require(train.global_batch % dp == 0, kUsage,
          "{}: train.global_batch = {} sequences cannot be shared by dp = {} ranks; the nearest that can is {}", name,
          train.global_batch, dp, std::max<int64_t>(1, (train.global_batch + dp / 2) / dp) * dp);
  const int64_t local = config.local_batch();
  if (train.micro_batch == 0) {
    train.micro_batch = std::min<int64_t>(8, local);
    while (local % train.micro_batch) --train.micro_batch;
  }
  require(train.micro_batch >= 1 && local % train.micro_batch == 0, kUsage,
          "{}: train.micro_batch = {} must divide train.global_batch = {}{}", name, train.micro_batch,
          train.global_batch, dp == 1 ? "" : fmt::format(" / dp = {} / {} = {}", train.global_batch, dp, local));
  try {
    check_schedule(config.parallel.schedule, config.mesh.pp, config.parallel.virtual_stages, config.micro_batches());
  } catch (const Error& error) {
    fail(error.kind(), "{}: {}", name, error.what());
  }
  require(train.steps >= 0 && train.tokens >= 0, kUsage, "{}: train.steps and train.tokens must not be negative", name);
  constexpr int64_t kMost = int64_t(1) << 60;
  require(train.steps <= kMost && train.tokens <= kMost, kUsage, "{}: train.steps and train.tokens end at {}", name,
          kMost);
  const double routed = double(train.micro_batch) * double(config.model.sequence) *
                        double(config.model.moe ? config.model.moe->top_k * config.mesh.ep : 1);
  require(routed < double(kLargestBatch), kUsage,
          "{}: a micro-batch of {} sequences of {} tokens has more rows than the index of a kernel; lower "
          "train.micro_batch",
          name, train.micro_batch, config.model.sequence);
  require(train.steps == 0 || train.tokens == 0, kUsage, "{}: give train.steps or train.tokens, not both", name);
  if (train.steps == 0) train.steps = (train.tokens + config.tokens_per_step() - 1) / config.tokens_per_step();
  train.tokens = 0;
  require(use == ConfigUse::shape || train.steps > 0, kUsage,
          "{}: train.steps is missing: say how many steps (or train.tokens = how many tokens) to train", name);
  require(train.log_every >= 1, kUsage, "{}: train.log_every = {} must be at least 1", name, train.log_every);
  require(train.eval_every >= 0 && train.eval_sequences >= 0, kUsage,
          "{}: train.eval_every and eval_sequences must not be negative", name);
  require(train.eval_every == 0 || !config.data.valid.empty(), kUsage, "{}: train.eval_every = {} needs data.valid",
          name, train.eval_every);
}

void resolve_optimizer(RunConfig& config, const std::string& name) {
  OptimizerConfig& optimizer = config.optimizer;
  if (!optimizer.min_lr) optimizer.min_lr = optimizer.lr / 10;
  if (!optimizer.warmup_steps) optimizer.warmup_steps = std::min<int64_t>(2500, config.train.steps / 10);
  if (!optimizer.decay_steps) optimizer.decay_steps = config.train.steps;
  require(optimizer.lr >= 0 && *optimizer.min_lr >= 0, kUsage, "{}: optimizer.lr and min_lr must not be negative",
          name);
  require(*optimizer.warmup_steps >= 0 && *optimizer.decay_steps >= 0, kUsage,
          "{}: optimizer.warmup_steps and decay_steps must not be negative", name);
  for (const auto& [key, beta] : {std::pair{"beta1", optimizer.beta1}, {"beta2", optimizer.beta2}})
    require(beta >= 0 && beta < 1, kUsage, "{}: optimizer.{} = {} must lie in [0, 1)", name, key, beta);
  // The kernels compute in f32.
  require(float(optimizer.eps) > 0, kUsage, "{}: optimizer.eps = {} must be positive, also in f32", name,
          optimizer.eps);
  for (const auto& [key, value] :
       {std::pair{"lr", optimizer.lr}, {"min_lr", *optimizer.min_lr}, {"weight_decay", optimizer.weight_decay}})
    require(std::isfinite(float(value)), kUsage, "{}: optimizer.{} = {} is beyond f32", name, key, value);
  require(optimizer.weight_decay >= 0 && optimizer.clip_norm >= 0, kUsage,
          "{}: optimizer.weight_decay and clip_norm must not be negative", name);
}

void resolve_rest(RunConfig& config, const std::string& name) {
  if (config.run.device == "auto") config.run.device = cuda_devices() > 0 ? "cuda" : "cpu";
  constexpr int64_t kWidestHead = 256;
  require(config.run.device == "cpu" || config.model.head_dim <= kWidestHead, kUsage,
          "{}: model.head_dim = {} is more than the {} that attention on a GPU takes; use run.device = \"cpu\"", name,
          config.model.head_dim, kWidestHead);
  if (config.precision.compute.empty()) config.precision.compute = config.run.device == "cuda" ? "bf16" : "f32";
  require(config.memory.recompute.empty(), kUsage, "{}: memory.recompute is not implemented yet; leave it empty", name);
  require(config.memory.offload.empty(), kUsage, "{}: memory.offload is not implemented yet; leave it empty", name);
  require(config.memory.moe_rows >= 1, kUsage, "{}: memory.moe_rows = {} must be at least 1", name,
          config.memory.moe_rows);
  require(!config.checkpoint.async, kUsage, "{}: checkpoint.async is not implemented yet; use false", name);
  require(config.checkpoint.model_only_every == 0, kUsage,
          "{}: checkpoint.model_only_every is not implemented yet; use 0", name);
  require(config.checkpoint.every >= 0, kUsage, "{}: checkpoint.every must not be negative", name);
  require(config.checkpoint.keep >= 1, kUsage, "{}: checkpoint.keep = {} must be at least 1", name,
          config.checkpoint.keep);
  if (config.run.dir.empty()) config.run.dir = default_run_dir(name);
}

}  // namespace

RunConfig parse_config(const std::string& text, const std::string& name, const std::vector<std::string>& overrides,
                       ConfigUse use, int64_t ranks) {
  toml::table root = parse_toml(text, name);
  for (const std::string& override_ : overrides) apply_override(root, override_);

  RunConfig config;
  const ModelConfig base = config.model = base_model(root, name);
  FieldReader reader(root, name, "");
  config.fields(reader);
  reader.finish();
  require(root.contains("model") || config.model.layers > 0, kUsage, "{}: section [model] is missing", name);

  resolve_model(config, name);
  if (!config.train.init_from.empty()) check_same_tensors(base, config.model, name);
  resolve_parallel(config, name, ranks);
  resolve_train(config, name, use);
  resolve_optimizer(config, name);
  resolve_rest(config, name);
  return config;
}

RunConfig load_config(const std::string& path, const std::vector<std::string>& overrides, ConfigUse use,
                      int64_t ranks) {
  std::error_code code;
  require(fs::is_regular_file(path, code), kUsage, "configuration {} does not exist or is not a file", path);
  return parse_config(read_text(path), path, overrides, use, ranks);
}

std::string to_toml(RunConfig config) {
  toml::table root;
  FieldWriter writer(root);
  config.fields(writer);
  std::ostringstream out;
  out << root << "\n";
  return out.str();
}

}  // namespace optimus
