#!/usr/bin/env bash
#SBATCH --job-name=optimus
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
# Trains under Slurm:  sbatch launch/slurm.sh CONFIG.toml [--set key=value ...]
#
# Ten minutes before the time is up Slurm sends SIGUSR1 to all ranks; they agree on a step, save and end with code 143, and
# the job is put back into the queue, to go on where it stopped. A finished run is left as it is. Any other end of a rank
# ends the step at once (--kill-on-bad-exit), so nobody waits for the dead.
set -euo pipefail
optimus=${OPTIMUS:-$SLURM_SUBMIT_DIR/build/release/optimus}
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK OMP_PLACES=cores OMP_PROC_BIND=close

code=0
srun --mpi=pmix --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores --kill-on-bad-exit=1 "$optimus" train "$@" || code=$?
if [[ $code -eq 143 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
