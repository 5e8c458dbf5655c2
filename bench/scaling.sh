#!/usr/bin/env bash
# A model on the GPUs of one host in every layout that its number of GPUs has, as a table: tokens/s of a GPU, efficiency
# against one GPU with the same share of the batch, what each group's transfers are waited for, memory and step time
# beside the plan's. Losses of the layouts stand beside each other: they differ by rounding only.
#
# Usage: bench/scaling.sh [optimus] [ranks] [config] [sequences a rank and step] [steps]
#   bench/scaling.sh build/cuda/optimus 8                                        Mula-7B-A1B
#   LAYOUTS="ep=8,allgather" bench/scaling.sh build/cuda/optimus 8 configs/mula-20b-a2b.toml 8    a model that one GPU does not hold
#
# LAYOUTS: those to run, "pp=P,ep=E,dispatcher[,sharding]", separated by blanks; without it all below. HARDWARE: of hardware/, for the plan.
# BASELINE=0: no run on one GPU, and no efficiencies.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
optimus=${1:-build/cuda/optimus}
ranks=${2:-$(nvidia-smi --list-gpus | wc -l)}
config=${3:-bench/mula-7b-4096.toml}
share=${4:-16}
steps=${5:-3}
hardware=${HARDWARE:-h200}

export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
[[ $(id -u) -eq 0 ]] && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT

number() { sed -n "s/.*\"$1\":\([-0-9.e+]*\).*/\1/p" <<< "$2" | head -1; }
# One row. What a run prints besides its result is shown where it fails.
row() { # name, ranks, overrides
  local name=$1 n=$2 result plan waits set=()
  shift 2
  local override
  for override in "$@" train.global_batch=$((share * n)); do set+=(--set "$override"); done
  if ! result=$(mpirun -n "$n" --bind-to none "$optimus" bench step "$config" --json --steps "$steps" "${set[@]}" 2> "$log"); then
    printf '| %s | failed: %s |\n' "$name" "$(grep -v '^-*$' "$log" | head -1)"
    return
  fi
  plan=$("$optimus" plan "$config" --ranks "$n" --hardware "$hardware" --json "${set[@]}" 2> "$log") || plan=
  waits=$(sed -n 's/.*"waited_seconds":{\([^}]*\)}.*/\1/p' <<< "$result" | tr -d '"' | tr ',' '\n' |
    awk -F: '{ printf "%s%s %.0f", (NR > 1 ? ", " : ""), $1, 1000 * $2 }')
  [[ $n -eq 1 ]] && one=$(number tokens_per_second "$result")
  awk -v name="$name" -v n="$n" -v one="${one:-0}" -v tokens="$(number tokens_per_second "$result")" \
    -v step="$(number step_seconds "$result")" -v predicted="$(number step_seconds "$plan")" -v waits="$waits" \
    -v planned="$(number total_bytes "$plan")" -v used="$(number used_bytes "$result")" -v loss="$(number loss "$result")" '
    BEGIN {
      printf "| %s | %.0f | %s | %.0f / %.0f (%+.0f %%) | %s | ", name, tokens / n,
        (one > 0 ? sprintf("%.1f %%", 100 * tokens / n / one) : ""), 1000 * predicted, 1000 * step, 100 * (predicted / step - 1), waits
      if (used > 0) printf "%.2f / %.2f (%+.1f %%)", planned / 1e9, used / 1e9, 100 * (planned / used - 1)
      printf " | %.5f |\n", loss }'
}
# The layouts of a number of ranks: pp, ep, dispatcher, sharding.
layouts() {
  local half=$((ranks / 2))
  echo "pp=1,ep=1,auto"
  for dispatcher in allgather alltoall; do
    echo "pp=1,ep=$ranks,$dispatcher"
    ((half > 1)) && echo "pp=1,ep=$half,$dispatcher"
    ((half > 1)) && echo "pp=2,ep=$half,$dispatcher"
  done
  echo "pp=1,ep=$ranks,alltoall,dp"
  ((half > 1)) && echo "pp=1,ep=$half,alltoall,dp"
  ((half == 1)) && echo "pp=2,ep=1,auto"
  return 0
}

echo "$config, $share sequences a rank and step, $steps steps"
echo
echo "| layout | tokens/s of a GPU | of one GPU | step ms, predicted / measured | waited for, ms | memory GB, planned / in use | loss |"
echo "|---|---|---|---|---|---|---|"
[[ ${BASELINE:-1} == 1 ]] && row "one GPU" 1
for layout in ${LAYOUTS:-$(layouts)}; do
  IFS=, read -r pp ep dispatcher sharding <<< "$layout"
  pp=${pp#pp=} ep=${ep#ep=} dp=$((ranks / ${pp#pp=}))
  name="pp $pp, dp $dp, ep $ep"
  [[ $ep -gt 1 ]] && name+=", $dispatcher"
  [[ ${sharding:-ep_aware} == dp ]] && name+=", SO" || name+=", EPSO"
  row "$name" "$ranks" "parallel.pp=$pp" "parallel.ep=$ep" "parallel.dispatcher=$dispatcher" \
    "optimizer.sharding=${sharding:-ep_aware}"
done
