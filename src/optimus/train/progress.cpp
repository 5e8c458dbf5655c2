#include "optimus/train/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

namespace optimus {
namespace {

constexpr double kAverageWeight = 0.1;  // of the newest step in the moving average behind the ETA
constexpr auto kRedrawInterval = std::chrono::milliseconds(100);

std::string format_rate(double tokens_per_second) {
  if (tokens_per_second >= 999.95e3) return fmt::format("{:.2f}M tokens/s", tokens_per_second / 1e6);
  if (tokens_per_second >= 999.5) return fmt::format("{:.1f}k tokens/s", tokens_per_second / 1e3);
  return fmt::format("{:.0f} tokens/s", tokens_per_second);
}

std::string format_bytes(int64_t bytes) {
  constexpr int64_t kGiB = int64_t(1) << 30;
  if (bytes >= kGiB) return fmt::format("{:.1f} GiB", double(bytes) / double(kGiB));
  return fmt::format("{} MiB", (bytes + (1 << 20) - 1) >> 20);
}

size_t terminal_columns(int descriptor) {
  winsize size{};
  return ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

/// A display that cannot be written to must not end a run, so failures are left unreported.
void write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(descriptor, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(size_t(written));
  }
}

}  // namespace

std::string format_duration(double seconds) {
  const auto whole = int64_t(std::max(seconds, 0.0));
  const int64_t minutes = whole / 60, hours = minutes / 60, days = hours / 24;
  if (days > 0) return fmt::format("{}d {:02}h", days, hours % 24);
  if (hours > 0) return fmt::format("{}h {:02}m", hours, minutes % 60);
  if (minutes > 0) return fmt::format("{}m {:02}s", minutes, whole % 60);
  return fmt::format("{}s", whole);
}

std::string format_progress(const StepRecord& record, std::optional<double> valid_loss, int64_t total_steps,
                            double seconds_left) {
  std::string line = fmt::format("step {}/{} | loss {:.4f}", record.step, total_steps, record.loss);
  if (valid_loss) line += fmt::format(" | valid {:.4f}", *valid_loss);
  line += " | " + format_rate(record.tokens_per_second);
  if (std::isfinite(record.mfu)) line += fmt::format(" | MFU {:.1f}%", 100.0 * record.mfu);
  if (record.memory_peak_bytes > 0) line += " | " + format_bytes(record.memory_peak_bytes);
  return line + " | ETA " + format_duration(seconds_left);
}

Progress::Progress(int64_t total_steps, int64_t log_every, int descriptor)
    : total_steps_(total_steps), log_every_(log_every), descriptor_(descriptor), terminal_(isatty(descriptor) == 1) {}

Progress::~Progress() { finish(); }

void Progress::update(const StepRecord& record) {
  const double last = seconds_per_step_.value_or(record.step_seconds);
  seconds_per_step_ = last + kAverageWeight * (record.step_seconds - last);
  if (record.valid_loss) valid_loss_ = record.valid_loss;
  const double seconds_left = *seconds_per_step_ * double(total_steps_ - record.step);

  if (terminal_) {
    line_ = format_progress(record, valid_loss_, total_steps_, seconds_left);
    if (Clock::now() - drawn_at_ >= kRedrawInterval) draw();
  } else if (record.step % log_every_ == 0 || record.step == total_steps_ || record.valid_loss) {
    write_all(descriptor_, format_progress(record, record.valid_loss, total_steps_, seconds_left) + "\n");
  }
}

void Progress::finish() {
  if (line_.empty()) return;
  draw();
  write_all(descriptor_, "\n");
  line_.clear();
}

void Progress::draw() {
  // One column short of the width: a full line would wrap on some terminals. "\x1b[K" clears what the last one left.
  const std::string_view visible = std::string_view(line_).substr(0, terminal_columns(descriptor_) - 1);
  write_all(descriptor_, fmt::format("\r{}\x1b[K", visible));
  drawn_at_ = Clock::now();
}

}  // namespace optimus
