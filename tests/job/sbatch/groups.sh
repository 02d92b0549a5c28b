#!/bin/bash
#SBATCH --job-name=pipeinfer
#SBATCH --time=30
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/jobs/pipeinfer-1/text
#SBATCH --error=/home/me/jobs/pipeinfer-1/log
#SBATCH --no-requeue
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH hetjob
#SBATCH --nodes=3
#SBATCH --ntasks=3
#SBATCH --cpus-per-task=36
#SBATCH --gpus-per-task=1
#SBATCH --partition=big

set -e
exec srun -X --mpi=pmi2 --het-group=0 -n 1 -c 8 /env/bin/pipeinfer run -m target.gguf -md draft.gguf -p x --results /home/me/jobs/pipeinfer-1/results.csv --trace /home/me/jobs/pipeinfer-1/trace.json : --het-group=1 -n 3 -c 36 /env/bin/pipeinfer run -m target.gguf -md draft.gguf -p x --results /home/me/jobs/pipeinfer-1/results.csv --trace /home/me/jobs/pipeinfer-1/trace.json
