#!/bin/bash
#SBATCH --job-name=pipeinfer
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/jobs/pipeinfer-1/text-%a
#SBATCH --error=/home/me/jobs/pipeinfer-1/log-%a
#SBATCH --array=0-2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@60
#SBATCH --ntasks=2

set -e
exec srun -X --mpi=pmi2 -n 2 /env/bin/pipeinfer batch '/home/me/jobs/pipeinfer-1/requests-'"$SLURM_ARRAY_TASK_ID"'.jsonl' -o out/o.jsonl -m target.gguf -md draft.gguf --resume '/home/me/jobs/pipeinfer-1/notes-'"$SLURM_ARRAY_TASK_ID"'' --output 'out/o-'"$SLURM_ARRAY_TASK_ID"'.jsonl'
