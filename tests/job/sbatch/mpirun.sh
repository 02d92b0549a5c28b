#!/bin/bash
#SBATCH --job-name=pipeinfer
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/jobs/pipeinfer-1/text
#SBATCH --error=/home/me/jobs/pipeinfer-1/log
#SBATCH --no-requeue
#SBATCH --ntasks=3

set -e
exec mpirun -np 3 /env/bin/pipeinfer plan -m target.gguf -md draft.gguf
