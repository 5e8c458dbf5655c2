#include "optimus/train/trainer.h"

#include <unistd.h>

#include <chrono>
#include <cmath>

#include "optimus/base/json.h"
#include "optimus/base/log.h"
#include "optimus/checkpoint/run_folder.h"
#include "optimus/comm/together.h"
#include "optimus/comm/watchdog.h"
#include "optimus/optim/schedule.h"
#include "optimus/train/backend.h"
#include "optimus/train/engine_plan.h"
#include "optimus/train/evaluation.h"
#include "optimus/train/run_state.h"

namespace optimus {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

void log_plan(const EnginePlan& plan, const RunConfig& config) {
  log().info("model: {:.2f} M parameters, {:.2f} MFLOP a token, on {}; memory by segment{}:",
             double(whole_table(config.model).count()) / 1e6, flops_per_token(config.model) / 1e6,
             config.device_kind() == DeviceKind::cuda ? "a GPU" : "the CPU",
             config.mesh.world() > 1 ? fmt::format(", the first of {} ranks", config.mesh.world()) : "");
  for (const auto& [name, bytes] : plan.segments) log().info("  {:<24} {:>10.2f} MiB", name, double(bytes) / 0x1p20);
  log().info("  {:<24} {:>10.2f} MiB", "total", double(plan.memory.total()) / 0x1p20);
}

}  // namespace

Trainer::Trainer(const RunConfig& config, const std::atomic<int>& signal, Processes& processes)
    : config_(config), signal_(signal), processes_(processes), device_(open_device(config.device_kind(), processes)) {
  together(processes, [&] {
    if (!first()) return;
    make_folder(fs::path(config.run.dir) / "checkpoints");
    lock_.emplace(fs::path(config.run.dir) / "lock", "run.dir " + config.run.dir);
    remove_leftovers(config.run.dir);
  });
  start_or_resume();
}

// The first rank looks, and reads every byte; the others take its word.
std::optional<Checkpoint> Trainer::agreed_checkpoint(const std::function<std::optional<Checkpoint>()>& find) {
  std::optional<Checkpoint> checkpoint;
  together(processes_, [&] {
    if (first()) checkpoint = find();
  });
  const std::string folder = processes_.broadcast(checkpoint ? checkpoint->folder().string() : "", 0);
  together(processes_, [&] {
    if (!first() && !folder.empty()) checkpoint.emplace(folder);
  });
  return checkpoint;
}

void Trainer::start_or_resume() {
  std::optional<Checkpoint> checkpoint = agreed_checkpoint([&] {
    std::optional<Checkpoint> newest = newest_valid(config_.run.dir);
    require(newest || step_folders(config_.run.dir).empty(), ErrorKind::kData,
            "{} holds checkpoints, but none that is valid; move them away to start anew", config_.run.dir);
    return newest;
  });
  if (checkpoint) {
    check_same_run(config_, *checkpoint);
    completed_ = saved_ = checkpoint->step();
    if (completed_ >= config_.train.steps) {
      if (first())
        log().info(
            "{} is finished: {} of {} steps are done. More train.steps go on with it, another run.dir starts anew",
            config_.run.dir, completed_, config_.train.steps);
      return;
    }
  }

  const EnginePlan plan = plan_engine(config_, EngineUse::train, processes_.rank());
  together(processes_, [&] {
    const int64_t sequence = config_.model.sequence, local = config_.local_batch();
    const int64_t from = place_of(config_.mesh, processes_.rank()).dp * local;
    loader_.emplace(config_.data, BatchPart{sequence, config_.model.vocab, config_.train.global_batch, from, local},
                    config_.train.seed);
    if (config_.train.eval_every > 0)
      valid_.emplace(config_.data, sequence, config_.model.vocab, config_.train.eval_sequences);
    if (checkpoint) check_same_data(*loader_, *checkpoint);
  });
  engine_ = make_engine(config_, EngineUse::train, *device_, plan, processes_);
  // A new run takes the table of run.dir.
  take_choices(
      *engine_, [&] { return checkpoint ? tuning_of(*checkpoint) : read_tuning(config_.run.dir); }, processes_);
  if (first()) log_plan(plan, config_);
  if (checkpoint) {
    load_state(*engine_, *checkpoint, processes_);
    origin_ = checkpoint->folder();
    if (first()) log().info("resumed from {}", checkpoint->folder().string());
  } else if (!config_.train.init_from.empty()) {
    std::optional<Checkpoint> source = agreed_checkpoint([&] { return resolve_checkpoint(config_.train.init_from); });
    load_weights(*engine_, *source, processes_);
    origin_ = source->folder();
    if (first()) log().info("weights from {}", source->folder().string());
  } else {
    engine_->initialise(uint64_t(config_.train.seed));
  }

  together(processes_, [&] {
    if (!first()) return;
    write_text_atomically(fs::path(config_.run.dir) / "config.toml", to_toml(config_));
    metrics_.emplace(config_.run.dir);
    metrics_->cut_back_to(completed_);
    tensorboard_.emplace(config_.run.dir, completed_);
    progress_.emplace(config_.train.steps, config_.train.log_every, STDERR_FILENO);
  });
}

int Trainer::run() {
  try {
    while (completed_ < config_.train.steps) {
      std::optional<HostBatch> batch = next_batch();
      if (!batch) break;
      train_step(std::move(*batch));
    }
  } catch (const Error& error) {
    // All ranks are here, with the same error, unless they can no longer speak with each other or a step broke off, which
    // one rank may do alone, and which leaves no state of any step.
    const bool agreed = error.kind() != ErrorKind::kCommunication && !stepping_;
    if (agreed) save_before_failing();
    // On GPUs, taking the engine down may wait for peers that never come.
    else if (processes_.size() > 1 && device_->kind() == DeviceKind::cuda)
      processes_.watchdog()->expect_end(error.what());
    throw;
  } catch (...) {
    if (processes_.size() == 1 && !stepping_) save_before_failing();
    throw;
  }
  if (completed_ != saved_) save(completed_);
  progress_.reset();
  if (first() && saved_ > 0)
    log().info("{} of {} steps are done, saved as {}", completed_, config_.train.steps,
               step_folder(config_.run.dir, saved_).string());
  return completed_ >= config_.train.steps ? 0 : 128 + stopped_by_;
}

std::optional<HostBatch> Trainer::next_batch() {
  constexpr int kFailed = 1 << 16;  // above every signal
  HostBatch batch;
  std::exception_ptr error;
  if (signal_ == 0) {
    try {
      batch = loader_->next(completed_);
    } catch (...) {
      error = std::current_exception();
    }
  }
  const int64_t agreed = processes_.max(error ? kFailed : int64_t(signal_));
  if (agreed == kFailed)
    together(processes_, [&] {
      if (error) std::rethrow_exception(error);
    });
  stopped_by_ = int(agreed);
  // A signal that came after its rank had looked stops the step after this one.
  if (agreed != 0) return std::nullopt;
  return batch;
}

void Trainer::train_step(HostBatch batch) {
  const auto start = Clock::now();
  stepping_ = true;
  engine_->step(completed_, batch);
  const StepResult result = engine_->result_wait();
  const double seconds = seconds_since(start);
  if (!result.finite) engine_->forget_step();
  stepping_ = false;
  if (!result.finite) {
    fail(ErrorKind::kNumerical,
         "step {}: loss {} or gradient norm {} is not finite. The update was not made: {} keeps the state before it. A "
         "lower optimizer.lr or other data may help",
         completed_ + 1, result.loss, result.gradient_norm, config_.run.dir);
  }
  ++completed_;
  report(completed_, seconds, result, evaluate(completed_));
  if (config_.checkpoint.every > 0 && completed_ % config_.checkpoint.every == 0) save(completed_);
}

std::optional<double> Trainer::evaluate(int64_t completed) {
  if (!valid_ || completed % config_.train.eval_every != 0) return std::nullopt;
  return evaluate_windows_wait(*engine_, *valid_, config_.train.micro_batch, processes_).loss;
}

void Trainer::report(int64_t completed, double seconds, const StepResult& result, std::optional<double> valid_loss) {
  together(processes_, [&] {
    if (first()) report_here(completed, seconds, result, valid_loss);
  });
}

void Trainer::report_here(int64_t completed, double seconds, const StepResult& result,
                          std::optional<double> valid_loss) {
  StepRecord record;
  record.step = completed;
  record.tokens = completed * config_.tokens_per_step();
  record.loss = result.loss;
  record.ce = result.cross_entropy;
  record.balance_loss = result.balance_loss;
  record.z_loss = result.z_loss;
  record.grad_norm = result.gradient_norm;
  record.lr = learning_rate(config_.optimizer, completed - 1);
  record.step_seconds = seconds;
  record.tokens_per_second = double(config_.tokens_per_step()) / seconds;
  record.tflops = record.tokens_per_second * flops_per_token(config_.model) / 1e12 / processes_.size();
  const double peak = device_->peak_flops();
  record.mfu = peak > 0 ? record.tflops * 1e12 / peak : NAN;
  record.memory_peak_bytes = engine_->peak_bytes();
  record.valid_loss = valid_loss;
  const int64_t first_moe_layer = config_.model.moe ? config_.model.moe->first_dense_layers : 0;
  for (size_t n = 0; n < result.expert_counts.size(); ++n)
    record.router.push_back(layer_load(first_moe_layer + int64_t(n), result.expert_counts[n]));

  progress_->update(record);
  const bool last = completed == config_.train.steps;
  if (completed % config_.train.log_every != 0 && !last && !valid_loss) return;
  metrics_->append(record);
  tensorboard_->add(completed, "loss", record.loss);
  tensorboard_->add(completed, "cross_entropy", record.ce);
  tensorboard_->add(completed, "gradient_norm", record.grad_norm);
  tensorboard_->add(completed, "learning_rate", record.lr);
  tensorboard_->add(completed, "tokens_per_second", record.tokens_per_second);
  if (valid_loss) tensorboard_->add(completed, "valid_loss", *valid_loss);
  if (!record.router.empty()) {
    tensorboard_->add(completed, "balance_loss", record.balance_loss);
    tensorboard_->add(completed, "z_loss", record.z_loss);
  }
  for (const LayerLoad& load : record.router)
    tensorboard_->add(completed, fmt::format("router/layer_{}/max_over_mean", load.layer), load.max_over_mean);
  tensorboard_->flush();
}

// Whatever went wrong, the updates made so far are good. When they cannot be saved either, the first error is the one
// to report.
void Trainer::save_before_failing() {
  try {
    if (completed_ > std::max<int64_t>(saved_, 0)) save(completed_);
  } catch (const Error& error) {
    if (first()) log().warn("the state after step {} could not be saved: {}", completed_, error.what());
  }
}

void Trainer::save(int64_t completed) {
  if (progress_) progress_->finish();
  require(engine_->weights_finite_wait(), ErrorKind::kNumerical,
          "the weights after step {} are not finite; they are not saved. A lower optimizer.lr may help", completed);
  const fs::path folder = step_folder(config_.run.dir, completed);
  nlohmann::json sections = section_to_json(config_);
  sections["data"]["windows"] = loader_->windows();
  if (const std::string choices = engine_->choices(); !choices.empty()) sections["tuning"] = choices;
  save_state(*engine_, folder, completed, std::move(sections), origin_, processes_);
  saved_ = completed;
  if (!origin_.empty()) origin_ = folder;  // the older one may be pruned
  together(processes_, [&] {
    if (first()) prune(config_.run.dir, config_.checkpoint.keep);
  });
}

}  // namespace optimus
