// Runs the tests on every process of mpirun. Rank 0 reports; the others speak only when something fails, with their
// rank. A test that stops early on one rank (a failed ASSERT, an exception) ends all of them at once, because the others
// would wait for it; other failures make the exit code of all ranks 1.
#include <cstdio>

#include <gtest/gtest.h>

#include "distributed/processes.h"
#include "optimus/base/error.h"

namespace optimus::test {
namespace {

Processes* started = nullptr;

class FailureReport final : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    test_ = fmt::format("{}.{}", test.test_suite_name(), test.name());
  }
  void OnTestEnd(const testing::TestInfo&) override { test_ = "outside of tests"; }
  /// GoogleTest holds its lock meanwhile: it cannot be asked for the test's name.
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    fmt::print(stderr, "[ rank {:2} ] {}, {}:{}\n{}\n", started->rank(), test_,
               result.file_name() ? result.file_name() : "", result.line_number(), result.message());
    if (result.fatally_failed()) started->abort(1);
  }

  std::string test_ = "outside of tests";
};

}  // namespace

Processes& processes() { return *started; }

}  // namespace optimus::test

int main(int argc, char** argv) {
  using namespace optimus::test;
  testing::InitGoogleTest(&argc, argv);
  try {
    const auto processes = optimus::start_processes();
    started = processes.get();
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    if (processes->rank() != 0) delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailureReport);  // which takes it over

    const int failed = RUN_ALL_TESTS();
    const int failed_anywhere = int(processes->max(failed));
    if (processes->rank() == 0 && failed_anywhere != failed) fmt::print("A test failed on another rank.\n");
    return failed_anywhere;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
