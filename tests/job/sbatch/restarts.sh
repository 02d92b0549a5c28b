#!/bin/bash
#SBATCH --job-name=pipeinfer
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/jobs/pipeinfer-1/text
#SBATCH --error=/home/me/jobs/pipeinfer-1/log
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --nodes=4
#SBATCH --ntasks=4

set -e
exec /env/bin/pipeinfer supervise --restarts 5 srun -X --mpi=pmi2 -n 4 /env/bin/pipeinfer batch in.jsonl -o out.jsonl -m target.gguf -md draft.gguf
