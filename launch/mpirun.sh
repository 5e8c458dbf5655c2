#!/usr/bin/env bash
# Trains on this machine with N ranks:  launch/mpirun.sh N CONFIG.toml [--set key=value ...]
#
# Ctrl-C and SIGTERM save a last checkpoint: they are handed to the ranks as SIGUSR1, which mpirun forwards to all of them
# at once. (mpirun's own answer to SIGTERM ends the ranks too fast for a large checkpoint.)
set -euo pipefail
ranks=$1
shift
folder=$(dirname "$(readlink -f "$0")")
optimus=${OPTIMUS:-$folder/../build/release/optimus}

# One rank may have more than one core; the program shares the machine's cores among its ranks.
export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
[[ $(id -u) -eq 0 ]] && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# In a session of its own, so that the terminal's Ctrl-C reaches this script only.
setsid mpirun -n "$ranks" "$optimus" train "$@" &
job=$!
trap 'kill -USR1 $job 2>/dev/null' INT TERM HUP
code=0
wait $job || code=$?
# A signal ends the wait, not the job.
while kill -0 $job 2>/dev/null; do
  code=0
  wait $job || code=$?
done
exit "$code"
