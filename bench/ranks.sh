#!/usr/bin/env bash
# Several ranks on one machine, one core each, as ratios of runs that follow each other:
#   1. throughput of two ranks over twice that of one,
#   2. a pipeline's bubble, measured and predicted,
#   3. seconds in the optimizer's update, EPSO over SO, measured and predicted.
# Usage: bench/ranks.sh [path of optimus]
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
optimus="${1:-build/release/optimus}"
config=bench/ranks.toml

export OMP_NUM_THREADS=1 OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_rmaps_base_oversubscribe=1
[[ $(id -u) -eq 0 ]] && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

rounds=5
number() { sed -n "s/.*\"$1\":\([-0-9.e+]*\).*/\1/p" | head -1; }
median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
step() { ranks=$1; shift; mpirun -n "$ranks" "$optimus" bench step $config --json --steps 10 "${@/#/--set=}" 2>/dev/null; }
values=$(mktemp -d)
trap 'rm -rf "$values"' EXIT

echo "1. throughput, tokens/s: medians of $rounds runs in turn"
for ((round = 0; round < rounds; ++round)); do
  step 1 train.global_batch=16 | number tokens_per_second >>"$values/one"
  step 2 | number tokens_per_second >>"$values/dp=2"
  step 2 parallel.ep=2 parallel.dispatcher=allgather | number tokens_per_second >>"$values/ep=2 allgather"
  step 2 parallel.ep=2 parallel.dispatcher=alltoall | number tokens_per_second >>"$values/ep=2 alltoall"
done
for layout in "dp=2" "ep=2 allgather" "ep=2 alltoall"; do
  awk -v one="$(median <"$values/one")" -v two="$(median <"$values/$layout")" -v name="$layout" \
    'BEGIN { printf "   one rank %.0f, two ranks (%s) %.0f: %.1f %% of twice\n", one, name, two, 50 * two / one }'
done

echo "2. bubble, pp = 2"
for schedule in gpipe 1f1b zero_bubble "interleaved parallel.virtual_stages=2"; do
  for batches in 4 8; do
    result=$(step 2 parallel.pp=2 parallel.schedule=$schedule train.global_batch=$((4 * batches)))
    awk -v measured="$(number measured <<<"$result")" -v predicted="$(number predicted <<<"$result")" \
      -v name="$schedule, $batches micro-batches" 'BEGIN {
      printf "   %s: measured %.1f %%, predicted %.1f %%: ratio %.2f\n", name, 100 * measured, 100 * predicted, measured / predicted }'
  done
done

echo "3. optimizer update, ep = 2: medians of $rounds runs in turn"
update() {
  mpirun -n 2 "$optimus" bench step $config --profile --json --steps 20 --set parallel.ep=2 --set optimizer.sharding="$1" \
    --set model.vocab=32768 --set model.sequence=16 --set train.global_batch=8 2>/dev/null |
    sed 's/.*"op":"adamw",[^}]*"milliseconds":\([0-9.e+-]*\).*/\1/'
}
for ((round = 0; round < rounds; ++round)); do
  update dp >>"$values/so"
  update ep_aware >>"$values/epso"
done
# X experts (4 layers x 8 x 3 x 256 x 256), half of them on a rank; N everything else.
awk -v so="$(median <"$values/so")" -v epso="$(median <"$values/epso")" 'BEGIN {
  x = 4 * 8 * 3 * 256 * 256 / 2; n = 2 * 32768 * 256 + 256 + 4 * (4 * 256 * 256 + 4 * 256 + 8 * 256)
  predicted = (x + n) / (x + n / 2)
  printf "   SO %.3f ms, EPSO %.3f ms: %.3f times faster, predicted %.3f\n", so, epso, so / epso, predicted }'
