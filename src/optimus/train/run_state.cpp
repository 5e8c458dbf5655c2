#include "optimus/train/run_state.h"

#include "optimus/base/json.h"
#include "optimus/base/log.h"
#include "optimus/checkpoint/writer.h"
#include "optimus/comm/together.h"

namespace optimus {
namespace {

TensorPart counts_part(Tensor counts) { return {"router.counts", DType::f32, counts.shape, whole(counts.shape), 0}; }

// A part's elements [first, first + count) in the engine's memory.
Tensor elements_of(Tensor flat, const TensorPart& part, int64_t first, size_t bytes) {
  return flat.reshape({flat.elements()}).slice(part.offset + first, int64_t(bytes) / size_of(part.dtype));
}

// The origin's "source"; its hf/ is copied.
nlohmann::json passed_on(const fs::path& origin, const CheckpointWriter& writer) {
  const fs::path to = writer.partial_folder() / "hf";
  if (fs::is_directory(origin / "hf")) {
    make_folder(to);
    for (const fs::directory_entry& entry : fs::directory_iterator(origin / "hf"))
      copy_file_durably(entry.path(), to / entry.path().filename());
    sync_folder(to);
  }
  return Checkpoint(origin).manifest().source;
}

std::vector<TensorPart> parts_of_ranges(const Engine& engine, const FlatState& state,
                                        const std::vector<FlatRange>& ranges) {
  std::vector<TensorPart> parts;
  for (const FlatRange& range : ranges) {
    const std::vector<TensorPart> more =
        parts_of(engine.table(), state.prefix, state.dtype, range.begin, range.count, range.offset);
    parts.insert(parts.end(), more.begin(), more.end());
  }
  return parts;
}

void load_flat(Engine& engine, Checkpoint& checkpoint, const FlatState& state) {
  checkpoint.load(parts_of_ranges(engine, state, state.held),
                  [&](const TensorPart& part, int64_t first, std::span<const std::byte> bytes) {
                    const int64_t size = size_of(part.dtype), begin = part.offset + first;
                    engine.write_state(state, begin, int64_t(bytes.size()) / size, [&](Tensor values, int64_t at) {
                      engine.device().from_host(values, bytes.data() + (at - begin) * size);
                    });
                  });
}

}  // namespace

void save_state(Engine& engine, const fs::path& folder, int64_t step, nlohmann::json sections, const fs::path& origin,
                Processes& processes) {
  CheckpointWriter writer(folder, step, processes);
  nlohmann::json source;
  together(processes, [&] {
    const auto write = [&](const std::string& file, const FlatState& state) {
      writer.write(file, parts_of_ranges(engine, state, state.owned),
                   [&](const TensorPart& part, int64_t first, std::span<std::byte> out) {
                     const int64_t size = size_of(part.dtype), begin = part.offset + first;
                     engine.read_state(state, begin, int64_t(out.size()) / size, [&](Tensor values, int64_t at) {
                       engine.device().to_host_wait(out.data() + (at - begin) * size, values);
                     });
                   });
    };
    write("weights.safetensors", engine.master_weights());
    for (const FlatState& moment : engine.moments()) write(moment.prefix + "safetensors", moment);
    const Tensor counts = engine.carried_counts();
    if (processes.rank() == 0 && counts)
      writer.write("router.safetensors", {counts_part(counts)},
                   [&](const TensorPart& part, int64_t first, std::span<std::byte> out) {
                     engine.device().to_host_wait(out.data(), elements_of(counts, part, first, out.size()));
                   });
    if (processes.rank() == 0 && !origin.empty()) source = passed_on(origin, writer);
  });
  writer.commit(std::move(sections), std::move(source));
}

void load_weights(Engine& engine, Checkpoint& checkpoint, Processes& processes) {
  together(processes, [&] { load_flat(engine, checkpoint, engine.master_weights()); });
  engine.refresh_weights();
}

void load_state(Engine& engine, Checkpoint& checkpoint, Processes& processes) {
  load_weights(engine, checkpoint, processes);
  together(processes, [&] {
    for (const FlatState& moment : engine.moments()) load_flat(engine, checkpoint, moment);
    if (const Tensor counts = engine.carried_counts(); counts && checkpoint.has("router.counts"))
      checkpoint.load({counts_part(counts)},
                      [&](const TensorPart& part, int64_t first, std::span<const std::byte> bytes) {
                        engine.device().from_host(elements_of(counts, part, first, bytes.size()), bytes.data());
                      });
  });
}

void load_weights(Engine& engine, Checkpoint& checkpoint) { load_weights(engine, checkpoint, *make_single_process()); }

void check_same_run(const RunConfig& config, const Checkpoint& checkpoint) {
  const nlohmann::json now = section_to_json(config);
  const nlohmann::json& then = checkpoint.manifest().config;
  auto check = [&](const char* section, const std::string& key) {
    const auto value = [&](const nlohmann::json& root) -> nlohmann::json {
      const auto found = root.find(section);
      return found != root.end() && found->is_object() ? found->value(key, nlohmann::json()) : nlohmann::json();
    };
    const nlohmann::json a = value(now), b = value(then);
    require(a == b, ErrorKind::kUsage,
            "{}.{} is {} now, but the run in {} was started with {}. Give the same value, or another run.dir", section,
            key, a.dump(), checkpoint.folder().string(), b.dump());
  };
  // What others are derived from comes first: it is what the user changed.
  for (const char* key : {"layers", "hidden", "heads", "sequence"}) check("model", key);
  for (const auto& [key, value] : now.at("model").items()) check("model", key);
  if (const auto model = then.find("model"); model != then.end() && model->is_object())
    for (const auto& [key, value] : model->items()) check("model", key);
  for (const char* key : {"train", "format", "tokenizer", "shuffle", "seed"}) check("data", key);
  for (const char* key : {"seed", "global_batch"}) check("train", key);
}

void check_same_data(const Loader& loader, const Checkpoint& checkpoint) {
  const std::string folder = checkpoint.folder().string();
  const nlohmann::json& data = member_of(checkpoint.manifest().config, "data", folder);
  const int64_t before = natural_of(member_of(data, "windows", folder), folder + ": data.windows");
  require(
      loader.windows() == before, ErrorKind::kUsage,
      "data.train has {} windows now, but {} when the run in {} was saved: the files have changed. Restore them, or "
      "give another run.dir",
      loader.windows(), before, folder);
}

void take_choices(Engine& engine, const std::function<std::string()>& read, Processes& processes) {
  std::string choices;
  together(processes, [&] {
    if (processes.rank() == 0) choices = read();
  });
  choices = processes.broadcast(choices, 0);
  if (choices.empty()) return;
  const bool refused = !engine.set_choices(choices);
  if (processes.max(refused) == 0) return;
  if (!refused) engine.set_choices({});
  if (processes.rank() == 0)
    log().warn("the tuned choices of algorithms are for another device or library, and are not used");
}

std::string tuning_of(const Checkpoint& checkpoint) {
  const nlohmann::json& config = checkpoint.manifest().config;
  const auto found = config.find("tuning");
  if (found == config.end()) return {};
  require(found->is_string(), ErrorKind::kData,
          "{}: the manifest's config.tuning is {}, not a text; without it the "
          "library's own choices are used",
          checkpoint.folder().string(), found->type_name());
  return *found;
}

}  // namespace optimus
