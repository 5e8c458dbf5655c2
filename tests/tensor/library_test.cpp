// Libraries that are opened at run time: what is missing is one sentence for the user, by name. Only CUDA builds have them.
#ifdef OPTIMUS_HAS_CUDA
#include "optimus/tensor/cuda/library.h"

#include <initializer_list>

#include <gtest/gtest.h>

#include "optimus/base/error.h"

namespace optimus::cuda {
namespace {

void expect_all(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
}

template <typename Action>
std::string usage_error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(Library, FindsFunctions) {
  const Library library("libm.so.6", "mathematics");
  double (*function)(double) = nullptr;
  library.find("floor", function);
  ASSERT_NE(function, nullptr);
  EXPECT_EQ(function(2.5), 2.0);
  expect_all(library.path(), {"/libm.so.6"});
}

TEST(Library, NamesWhatIsMissingAndWhatToDo) {
  expect_all(usage_error_of([] { Library("libnowhere.so.7", "for a test"); }),
             {"libnowhere.so.7", "for a test", "LD_LIBRARY_PATH", "run.device = \"cpu\""});
}

TEST(Library, NamesTheFunctionThatAnOldOneLacks) {
  const Library library("libm.so.6", "mathematics");
  double (*function)(double) = nullptr;
  expect_all(usage_error_of([&] { library.find("cube_root", function); }),
             {"libm.so.6", "cube_root", "LD_LIBRARY_PATH", "run.device = \"cpu\""});
}

}  // namespace
}  // namespace optimus::cuda
#endif
