#include "optimus/data/loader.h"

#include <algorithm>
#include <numeric>

#include "optimus/base/error.h"
#include "optimus/base/log.h"

namespace optimus {
namespace {

/// Batches made before they are asked for: enough to cover a slow page of the disk.
constexpr size_t kBatchesAhead = 3;

/// Opens the files behind `key` ("data.train"); at least one window must come out.
std::vector<TokenFile> open_files(const std::vector<DataSource>& sources, std::string_view key,
                                  const std::string& format, int64_t sequence, int64_t vocab) {
  require(!sources.empty(), ErrorKind::kUsage, "{} is missing: name token files, made with `optimus tokenize`, say",
          key);
  require(sequence >= 2, ErrorKind::kUsage, "model.sequence is {}, but predicting the next token needs at least 2",
          sequence);
  std::vector<TokenFile> files;
  std::string short_files;
  for (const DataSource& source : sources) {
    const TokenFile& file = files.emplace_back(source.path, format, vocab);
    if (file.size() >= sequence) continue;
    const std::string text = fmt::format("{} has {} tokens", file.path().string(), file.size());
    require(!source.weight, ErrorKind::kData,
            "{}: {}, less than one window of model.sequence = {}, so it cannot have a weight: remove it or shorten the "
            "sequence",
            key, text, sequence);
    short_files += (short_files.empty() ? "" : ", ") + text;
  }
  const bool any_window = std::ranges::any_of(files, [&](const TokenFile& file) { return file.size() >= sequence; });
  require(any_window, ErrorKind::kData,
          "{}: {}, less than one window of model.sequence = {}: add data or shorten the sequence", key, short_files,
          sequence);
  if (!short_files.empty())
    log().warn("{}: {}, less than one window of {} tokens: nothing of it is read", key, short_files, sequence);
  return files;
}

std::vector<int64_t> window_counts(const std::vector<TokenFile>& files, int64_t sequence) {
  std::vector<int64_t> counts;
  for (const TokenFile& file : files) counts.push_back(file.size() / sequence);
  return counts;
}

int64_t total_windows(const std::vector<TokenFile>& files, int64_t sequence) {
  const std::vector<int64_t> counts = window_counts(files, sequence);
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

/// The sources' weights: one each, or none at all.
std::vector<double> weights_of(const std::vector<DataSource>& sources) {
  std::vector<double> weights;
  for (const DataSource& source : sources)
    if (source.weight) weights.push_back(*source.weight);
  require(weights.empty() || weights.size() == sources.size(), ErrorKind::kUsage,
          "data.train gives {} of its {} sources a weight: give one to every source or to none", weights.size(),
          sources.size());
  return weights;
}

}  // namespace

HostBatch next_token_batch(std::vector<int32_t> tokens, int64_t sequence) {
  const size_t size = tokens.size(), S = size_t(sequence);
  expects(sequence > 0 && size % S == 0, "{} tokens in sequences of {}", size, sequence);
  HostBatch batch{.sequences = int64_t(size / S),
                  .sequence_length = sequence,
                  .tokens = std::move(tokens),
                  .targets = std::vector<int32_t>(size),
                  .positions = std::vector<int32_t>(size),
                  .weights = std::vector<float>(size)};
  for (size_t begin = 0; begin < size; begin += S) {
    for (size_t t = 0; t < S; ++t) batch.positions[begin + t] = int32_t(t);
    for (size_t t = 0; t + 1 < S; ++t) {
      batch.targets[begin + t] = batch.tokens[begin + t + 1];
      batch.weights[begin + t] = 1.0f;
    }
  }
  return batch;
}

Loader::Loader(const DataConfig& config, const BatchPart& part, int64_t default_seed)
    : part_(part),
      files_(open_files(config.train, "data.train", config.format, part.sequence, part.vocab)),
      windows_(total_windows(files_, part.sequence)),
      sampler_(window_counts(files_, part.sequence), weights_of(config.train),
               uint64_t(config.seed.value_or(default_seed)), config.shuffle) {
  expects(part.global_batch > 0 && part.first >= 0 && part.count > 0 && part.first <= part.global_batch - part.count,
          "samples {} to {} of a batch of {}", part.first, part.first + part.count, part.global_batch);
}

HostBatch Loader::batch(int64_t step) const {
  const int64_t S = part_.sequence;
  std::vector<int32_t> tokens(size_t(part_.count * S));
  for (int64_t i = 0; i < part_.count; ++i) {
    const Window window = sampler_.at(step * part_.global_batch + part_.first + i);
    files_[size_t(window.source)].read(window.index * S, S, tokens.data() + i * S);
  }
  return next_token_batch(std::move(tokens), S);
}

HostBatch Loader::next(int64_t step) {
  if (step != next_step_) {
    thread_ = std::jthread();  // stops and joins
    ahead_.clear();
    thread_ = std::jthread([this, step](const std::stop_token& stop) { read_ahead(stop, step); });
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !ahead_.empty(); });
  Ahead front = std::move(ahead_.front());
  ahead_.pop_front();
  lock.unlock();
  changed_.notify_all();
  next_step_ = front.error ? -1 : step + 1;  // reading ahead ended at the error
  if (front.error) std::rethrow_exception(front.error);
  return std::move(front.batch);
}

void Loader::read_ahead(const std::stop_token& stop, int64_t step) {
  for (bool failed = false; !failed; ++step) {
    Ahead made;
    try {
      made.batch = batch(step);
    } catch (...) {
      made.error = std::current_exception();
      failed = true;
    }
    std::unique_lock lock(mutex_);
    if (!changed_.wait(lock, stop, [&] { return ahead_.size() < kBatchesAhead; }) || stop.stop_requested()) return;
    ahead_.push_back(std::move(made));
    lock.unlock();
    changed_.notify_all();
  }
}

EvalWindows::EvalWindows(const DataConfig& config, int64_t sequence, int64_t vocab, int64_t limit)
    : sequence_(sequence), files_(open_files(config.valid, "data.valid", config.format, sequence, vocab)) {
  for (const DataSource& source : config.valid)
    require(!source.weight, ErrorKind::kUsage,
            "data.valid gives {} a weight, but validation reads every file in order: remove the weight", source.path);
  windows_ = total_windows(files_, sequence);
  if (limit > 0) windows_ = std::min(windows_, limit);
}

HostBatch EvalWindows::batch(int64_t first, int64_t count) const {
  expects(first >= 0 && count > 0 && first <= windows_ - count, "windows {} to {} of {}", first, first + count,
          windows_);
  std::vector<int32_t> tokens(size_t(count * sequence_));
  int64_t file_first = 0;  // number of the file's first window
  for (const TokenFile& file : files_) {
    const int64_t file_end = file_first + file.size() / sequence_;
    const int64_t begin = std::max(first, file_first), end = std::min(first + count, file_end);
    int32_t* out = tokens.data() + (begin - first) * sequence_;
    if (begin < end) file.read((begin - file_first) * sequence_, (end - begin) * sequence_, out);
    file_first = file_end;
  }
  return next_token_batch(std::move(tokens), sequence_);
}

}  // namespace optimus
