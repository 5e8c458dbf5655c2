#include "optimus/train/progress.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include <gtest/gtest.h>

namespace optimus {
namespace {

StepRecord record_of(int64_t step) {
  StepRecord record;
  record.step = step;
  record.loss = 2.0;
  record.step_seconds = 0.5;
  record.tokens_per_second = 1234.0;
  record.mfu = 0.4125;
  record.memory_peak_bytes = int64_t(3) << 30;
  return record;
}

/// What can be read from a descriptor. A terminal hands on what was written to it a moment later, and in pieces.
std::string drain(int descriptor) {
  std::string text;
  for (pollfd ready{descriptor, POLLIN, 0}; poll(&ready, 1, 200) > 0 && (ready.revents & POLLIN);) {
    char buffer[4096];
    const ssize_t bytes = read(descriptor, buffer, sizeof buffer);
    if (bytes <= 0) break;
    text.append(buffer, size_t(bytes));
  }
  return text;
}

TEST(FormatDuration, TwoLeadingUnits) {
  EXPECT_EQ(format_duration(-3.0), "0s");
  EXPECT_EQ(format_duration(59.9), "59s");
  EXPECT_EQ(format_duration(60.0), "1m 00s");
  EXPECT_EQ(format_duration(3599.0), "59m 59s");
  EXPECT_EQ(format_duration(3600.0 + 125.0), "1h 02m");
  EXPECT_EQ(format_duration(3 * 86400.0 + 4 * 3600.0 + 59.0), "3d 04h");
}

TEST(FormatProgress, AllParts) {
  EXPECT_EQ(format_progress(record_of(120), 2.25, 5000, 3725.0),
            "step 120/5000 | loss 2.0000 | valid 2.2500 | 1.2k tokens/s | MFU 41.2% | 3.0 GiB | ETA 1h 02m");
}

TEST(FormatProgress, WhatIsUnknownIsLeftOut) {
  StepRecord record = record_of(1);
  record.mfu = std::numeric_limits<double>::quiet_NaN();
  record.memory_peak_bytes = 0;
  EXPECT_EQ(format_progress(record, std::nullopt, 2, 0.5), "step 1/2 | loss 2.0000 | 1.2k tokens/s | ETA 0s");
}

TEST(FormatProgress, UnitsFollowTheSize) {
  auto rate = [](double tokens_per_second) {
    StepRecord record;
    record.tokens_per_second = tokens_per_second;
    record.mfu = std::numeric_limits<double>::quiet_NaN();
    return format_progress(record, std::nullopt, 1, 0.0);
  };
  EXPECT_EQ(rate(999.4), "step 0/1 | loss 0.0000 | 999 tokens/s | ETA 0s");
  EXPECT_EQ(rate(999.6), "step 0/1 | loss 0.0000 | 1.0k tokens/s | ETA 0s");
  EXPECT_EQ(rate(999.9e3), "step 0/1 | loss 0.0000 | 999.9k tokens/s | ETA 0s");
  EXPECT_EQ(rate(999.96e3), "step 0/1 | loss 0.0000 | 1.00M tokens/s | ETA 0s");
  StepRecord record;
  record.memory_peak_bytes = (5 << 20) + 1;
  EXPECT_EQ(format_progress(record, std::nullopt, 1, 0.0),
            "step 0/1 | loss 0.0000 | 0 tokens/s | MFU 0.0% | 6 MiB | ETA 0s");
}

TEST(Progress, PipedWritesALineALogInterval) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  {
    Progress progress(25, 10, ends[1]);
    for (int64_t step = 1; step <= 25; ++step) {
      StepRecord record = record_of(step);
      if (step == 15) record.valid_loss = 3.0;
      progress.update(record);
    }
  }
  const std::string tail = " | 1.2k tokens/s | MFU 41.2% | 3.0 GiB | ETA ";
  EXPECT_EQ(drain(ends[0]), "step 10/25 | loss 2.0000" + tail + "7s\n" +                     //
                                "step 15/25 | loss 2.0000 | valid 3.0000" + tail + "5s\n" +  // evaluation
                                "step 20/25 | loss 2.0000" + tail + "2s\n" +                 //
                                "step 25/25 | loss 2.0000" + tail + "0s\n");                 // last
  close(ends[0]);
  close(ends[1]);
}

TEST(Progress, TheEstimateFollowsTheRecentSteps) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  Progress progress(1000, 100, ends[1]);
  for (int64_t step = 1; step <= 100; ++step) {
    StepRecord record = record_of(step);
    record.step_seconds = step == 1 ? 60.0 : 1.0;  // a slow first step must not stay in the estimate: 900 steps of 1 s
    progress.update(record);
  }
  EXPECT_NE(drain(ends[0]).find("ETA 15m 01s"), std::string::npos);
  close(ends[0]);
  close(ends[1]);
}

class ProgressOnTerminal : public testing::Test {
 protected:
  void SetUp() override {
    main_ = posix_openpt(O_RDWR | O_NOCTTY);
    if (main_ < 0 || grantpt(main_) != 0 || unlockpt(main_) != 0) GTEST_SKIP() << "no pseudo terminals here";
    terminal_ = open(ptsname(main_), O_RDWR | O_NOCTTY);
    ASSERT_GE(terminal_, 0);
    winsize size{.ws_row = 24, .ws_col = 40, .ws_xpixel = 0, .ws_ypixel = 0};
    ASSERT_EQ(ioctl(main_, TIOCSWINSZ, &size), 0);
  }
  void TearDown() override {
    if (terminal_ >= 0) close(terminal_);
    if (main_ >= 0) close(main_);
  }

  int main_ = -1, terminal_ = -1;
};

TEST_F(ProgressOnTerminal, OneLineIsRedrawnInPlaceAndEndedOnce) {
  Progress progress(500, 100, terminal_);
  progress.update(record_of(7));
  // Cut to one column less than the terminal's 40, so that it never wraps.
  EXPECT_EQ(drain(main_), "\rstep 7/500 | loss 2.0000 | 1.2k tokens/\x1b[K");
  progress.update(record_of(8));  // too soon to be drawn, but it is what finish() leaves on the screen
  progress.finish();
  const std::string text = drain(main_);
  EXPECT_TRUE(text.ends_with("\rstep 8/500 | loss 2.0000 | 1.2k tokens/\x1b[K\r\n")) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  progress.finish();
  EXPECT_EQ(drain(main_), "");
}

TEST_F(ProgressOnTerminal, DestructionEndsTheLine) {
  { Progress(500, 100, terminal_).update(record_of(7)); }
  EXPECT_TRUE(drain(main_).ends_with("\r\n"));
}

}  // namespace
}  // namespace optimus
