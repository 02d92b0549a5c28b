#!/bin/bash
#SBATCH --job-name=pipeinfer
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/jobs/pipeinfer-1/text
#SBATCH --error=/home/me/jobs/pipeinfer-1/log
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@60
#SBATCH --ntasks=2

set -e
[ ! -s /home/me/jobs/pipeinfer-1/text ] || cp /home/me/jobs/pipeinfer-1/text /home/me/jobs/pipeinfer-1/text.before
: > /home/me/jobs/pipeinfer-1/text
exec srun -X --mpi=pmi2 -n 2 /env/bin/pipeinfer run -m target.gguf -md draft.gguf -p x --results /home/me/jobs/pipeinfer-1/results.csv --trace /home/me/jobs/pipeinfer-1/trace.json --resume /home/me/jobs/pipeinfer-1/notes
