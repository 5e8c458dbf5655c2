// A layout is not semantics: every way to cut the training of a tiny model over the ranks of this run gives what one rank
// alone computes, tensor by tensor: losses, norm, gradients, weights after five steps. A covering selection of layouts
// (every pair of choices occurs) runs by default, all of them with OPTIMUS_ALL_LAYOUTS set.
#include <cstdlib>
#include <set>

#include "distributed/layouts.h"

namespace optimus::test {
namespace {

class Layouts : public testing::TestWithParam<const char*> {};

TEST_P(Layouts, AreNotSemantics) {
  const Variant& variant = variant_named(GetParam());
  const std::vector<Layout> all = layouts_for(variant, processes().size());
  const std::vector<Layout> chosen = std::getenv("OPTIMUS_ALL_LAYOUTS") ? all : covering(all);
  if (processes().rank() == 0) fmt::print("{} of {} layouts\n", chosen.size(), all.size());
  for (const Layout& layout : chosen) {
    SCOPED_TRACE(layout.text());
    const ReferenceRun& reference = reference_of(variant, layout.unit);
    // With one step nothing has been updated that could move a choice; equal scores choose by number.
    if (variant.steps > 1) {
      ASSERT_GT(reference.smallest_gap, 1e-5) << "choose another seed: rounding could change an expert";
    }
    expect_equal_to(reference, variant, layout);
    if (HasFailure()) break;
  }
  if (processes().rank() == 0)
    fmt::print("smallest relative top-k gap {:.2e}\n", reference_of(variant, chosen.front().unit).smallest_gap);
}

std::vector<const char*> names() {
  std::vector<const char*> all;
  for (const Variant& variant : variants()) all.push_back(variant.name);
  return all;
}
INSTANTIATE_TEST_SUITE_P(All, Layouts, testing::ValuesIn(names()),
                         [](const auto& info) { return std::string(info.param); });

// The selection is one: every pair of choices of the full product is in it.
TEST(LayoutSelection, CoversEveryPair) {
  const std::vector<Layout> all = layouts_for(variants().front(), processes().size());
  std::set<std::string> pairs, covered;
  const auto collect = [](const Layout& layout, std::set<std::string>& into) {
    const std::vector<std::string> choices = layout.choices();
    for (size_t i = 0; i < choices.size(); ++i)
      for (size_t j = 0; j <= i; ++j) into.insert(choices[j] + " " + choices[i]);
  };
  for (const Layout& layout : all) collect(layout, pairs);
  for (const Layout& layout : covering(all)) collect(layout, covered);
  EXPECT_EQ(covered, pairs);
}

}  // namespace
}  // namespace optimus::test
