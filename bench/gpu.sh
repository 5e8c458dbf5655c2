#!/usr/bin/env bash
# Every GPU figure of bench/results/h200.md, in one run on one card: all kernels at 16,384 tokens of Mula-7B-A1B (sequence
# 4096), whole steps of it and of a small model.
#
# Usage: bench/gpu.sh [path of optimus] [folder with the peer's micro.py]
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."

optimus=${1:-build/cuda/optimus}
peer=${2:-}
seven=bench/mula-7b-4096.toml

echo "commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown)"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
echo "## Kernels"
"$optimus" bench ops "$seven"
"$optimus" bench ops "$seven" --only "attention backward" --set run.deterministic=false
if [[ -n $peer ]]; then
  echo "## The peer's kernels, same card, same minutes"
  python3 "$peer/micro.py"
fi
echo "## Mula-7B-A1B, sequence 4096, 64 sequences a step, whole steps"
"$optimus" bench step "$seven" --steps 3
echo "## Byte-level MoE of 2.4 M parameters, 12 x 64 tokens a step"
"$optimus" bench step bench/small.toml --steps 300
