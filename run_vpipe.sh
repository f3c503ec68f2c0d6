#!/bin/bash
# A run on SLURM: sbatch run_vpipe.sh [CONFIG [options of vpipe train]]
# Submit it in this folder or in one below. `vpipe train CONFIG --slurm --dry-run` writes a script like this for any run.
#SBATCH --job-name=vpipe
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --gpus-per-node=4
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# --ntasks: a task for each rank of the configuration. On a cluster without GPUs: sbatch --gpus-per-node=0 run_vpipe.sh
# --signal: 120 s before the time limit the ranks save and end with exit code 75; the job goes back into the queue.

root=$SLURM_SUBMIT_DIR  # the script itself runs as a copy
until [ -e "$root/run_vpipe.sh" ] || [ "$root" = / ]; do root=$(dirname "$root"); done
vpipe=$(command -v vpipe || echo "$root/.venv/bin/vpipe")
[ $# -gt 0 ] || set -- "$root/configs/bert_4vpipe.yml"

ended=
trap 'ended=yes' TERM  # scancel; or SLURM requeues the job by itself
srun --kill-on-bad-exit=0 "$vpipe" train "$@"
code=$?
if [ "$code" = 75 ] && [ -z "$ended" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
