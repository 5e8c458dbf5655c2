#!/usr/bin/env bash
# A model on the GPUs of one host in every layout that its number of GPUs has, as a table: tokens/s of a rank, efficiency
# against one rank with the same share of the batch, what each group's transfers are waited for, memory and step time
# beside the plan's. Losses of the layouts stand beside each other: they differ by rounding only. (One rank's differs: its batch is
# a part of theirs.)
#
# Usage: bench/scaling.sh [optimus] [ranks] [config] [sequences a rank and step] [steps]
#   bench/scaling.sh build/cuda/optimus 8                                        Mula-7B-A1B
#   BASELINE=0 LAYOUTS="1,8,allgather 1,8,alltoall" bench/scaling.sh build/cuda/optimus 8 configs/mula-20b-a2b.toml 8
#
# LAYOUTS: "pp,ep,dispatcher[,sharding]", separated by blanks; without it all that the number of ranks has. HARDWARE: of
# hardware/, for the plan; "" for none. BASELINE=0: no run of one rank, and no efficiencies. It also runs where ranks are CPU cores
# (HARDWARE="" bench/scaling.sh build/release/optimus 2 bench/ranks.toml 8), where one rank has all cores to itself.
# A layout that fails has its reason in the table, and the script then ends with 1.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
refuse() { echo "bench/scaling.sh: $1" >&2; exit 2; }
optimus=$(readlink -f "${1:-build/cuda/optimus}")
gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l || true)
ranks=${2:-$gpus}
config=${3:-bench/mula-7b-4096.toml}
share=${4:-16}
steps=${5:-3}
hardware=${HARDWARE-h200}
[[ -x $optimus ]] || refuse "no program at ${1:-build/cuda/optimus}"
[[ -f $config ]] || refuse "no configuration at $config"
[[ $ranks =~ ^[1-9][0-9]*$ && $ranks -gt 1 ]] || refuse "it takes 2 or more ranks, not \"$ranks\"; this machine shows $gpus GPUs"
for number in "$share" "$steps"; do
  [[ $number =~ ^[1-9][0-9]*$ ]] || refuse "sequences a rank and steps are whole numbers from 1 on, not \"$number\""
done
for layout in ${LAYOUTS:-}; do
  [[ $layout =~ ^[1-9][0-9]*,[1-9][0-9]*,(auto|allgather|alltoall)(,(dp|ep_aware|none))?$ ]] ||
    refuse "LAYOUTS holds \"$layout\"; it takes pp,ep,dispatcher[,sharding], 1,8,alltoall,dp say"
done

export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
[[ $(id -u) -eq 0 ]] && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT

number() { sed -n "s/.*\"$1\":\([-0-9.e+]*\).*/\1/p" <<< "$2" | head -1; }
failed=0
# The error that the program printed, or the launcher's first line.
reason() { { grep -m1 -o 'optimus: .*' "$log" || grep -m1 -v '^-*$' "$log" || echo "without a word"; } | tr '|' '/'; }
row() { # name, ranks, overrides
  local name=$1 n=$2 result plan waits set=()
  shift 2
  local override
  for override in "$@" train.global_batch=$((share * n)); do set+=(--set "$override"); done
  if ! result=$(mpirun -n "$n" --bind-to none "$optimus" bench step "$config" --json --steps "$steps" "${set[@]}" 2> "$log"); then
    printf '| %s | failed: %s | | | | | |\n' "$name" "$(reason)"
    failed=1
    return
  fi
  plan=
  if [[ -n $hardware ]] && ! plan=$("$optimus" plan "$config" --ranks "$n" --hardware "$hardware" --json "${set[@]}" 2> "$log"); then
    printf '| %s | its plan failed: %s | | | | | |\n' "$name" "$(reason)"
    failed=1
    return
  fi
  waits=$(sed -n 's/.*"waited_seconds":{\([^}]*\)}.*/\1/p' <<< "$result" | tr -d '"' | tr ',' '\n' |
    awk -F: '{ printf "%s%s %.0f", (NR > 1 ? ", " : ""), $1, 1000 * $2 }')
  [[ $n -eq 1 ]] && one=$(number tokens_per_second "$result")
  awk -v name="$name" -v n="$n" -v one="${one:-0}" -v tokens="$(number tokens_per_second "$result")" \
    -v step="$(number step_seconds "$result")" -v predicted="$(number step_seconds "${plan:-none}")" -v waits="$waits" \
    -v planned="$(number total_bytes "${plan:-none}")" -v used="$(number used_bytes "$result")" -v loss="$(number loss "$result")" '
    BEGIN {
      printf "| %s | %.0f | %s | ", name, tokens / n, (one > 0 ? sprintf("%.1f %%", 100 * tokens / n / one) : "")
      if (predicted > 0) printf "%.0f / %.0f (%+.0f %%)", 1000 * predicted, 1000 * step, 100 * (predicted / step - 1)
      else printf "%.0f", 1000 * step
      printf " | %s | ", waits
      if (used > 0 && planned > 0) printf "%.2f / %.2f (%+.1f %%)", planned / 1e9, used / 1e9, 100 * (planned / used - 1)
      printf " | %.5f |\n", loss }'
}
# All layouts of the number of ranks.
layouts() {
  local half=$((ranks / 2))
  echo "1,1,auto"
  for dispatcher in allgather alltoall; do
    echo "1,$ranks,$dispatcher"
    ((ranks % 2 == 0 && half > 1)) && echo "1,$half,$dispatcher" "2,$half,$dispatcher"
  done
  echo "1,$ranks,alltoall,dp"
  ((ranks % 2 == 0 && half > 1)) && echo "1,$half,alltoall,dp"
  ((half == 1)) && echo "2,1,auto"
  return 0
}

echo "$config, $share sequences a rank and step, $steps steps"
echo
echo "| layout | tokens/s of a rank | of one alone | step ms, predicted / measured | waited for, ms | memory GB, planned / in use | loss |"
echo "|---|---|---|---|---|---|---|"
[[ ${BASELINE:-1} == 1 ]] && row "one rank" 1
for layout in ${LAYOUTS:-$(layouts)}; do
  IFS=, read -r pp ep dispatcher sharding <<< "$layout"
  dp=$((ranks / pp))
  name="pp $pp, dp $dp, ep $ep"
  [[ $ep -gt 1 ]] && name+=", $dispatcher"
  case ${sharding:-ep_aware} in
    dp) name+=", SO" ;;
    ep_aware) name+=", EPSO" ;;
    none) name+=", not sharded" ;;
  esac
  row "$name" "$ranks" "parallel.pp=$pp" "parallel.ep=$ep" "parallel.dispatcher=$dispatcher" \
    "optimizer.sharding=${sharding:-ep_aware}"
done
exit "$failed"
