#!/usr/bin/env bash
# Builds and runs all tests, first optimised, then under AddressSanitizer and UndefinedBehaviorSanitizer; the latter is
# left out when OPTIMUS_QUICK is set. Arguments go to ctest: ./test.sh -R ops/
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

tools/install_packages.sh

# Tests run side by side, so each gets few threads, and threads that wait do not take a core from another test.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY=passive

presets=(release asan)
[[ -n "${OPTIMUS_QUICK:-}" ]] && presets=(release)

for preset in "${presets[@]}"; do
  cmake --preset "$preset" -DOPTIMUS_TESTS=ON
  cmake --build --preset "$preset"
  ctest --preset "$preset" --parallel "$(nproc)" "$@"
done
