#!/usr/bin/env bash
# Builds and runs all tests, first optimised, then under AddressSanitizer and UndefinedBehaviorSanitizer; the latter is
# left out when OPTIMUS_QUICK is set. OPTIMUS_PRESETS names other presets: with "cuda asan" the optimised build has the CUDA
# backend, too, whose tests run where a GPU is. Arguments go to ctest: ./test.sh -R ops/
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")"

tools/install_packages.sh

# Tests run side by side, so each gets few threads, and threads that wait do not take a core from another test.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY=passive

read -ra presets <<< "${OPTIMUS_PRESETS:-release asan}"
[[ -n "${OPTIMUS_QUICK:-}" ]] && presets=("${presets[0]}")

for preset in "${presets[@]}"; do
  cmake --preset "$preset" -DOPTIMUS_TESTS=ON
  cmake --build --preset "$preset"
  ctest --preset "$preset" --parallel "$(nproc)" "$@"
done
