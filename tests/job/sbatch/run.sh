#!/bin/bash
#SBATCH --job-name=pipeinfer
#SBATCH --time=12:00:00
#SBATCH --account=lab
#SBATCH --chdir=/home/me
#SBATCH --output=/home/me/jobs/pipeinfer-1/text
#SBATCH --error=/home/me/jobs/pipeinfer-1/log
#SBATCH --no-requeue
#SBATCH --nodes=4
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=36
#SBATCH --mem=300G
#SBATCH --partition=main

set -e
exec srun -X --mpi=pmi2 -n 4 -c 36 /env/bin/pipeinfer run -m target.gguf -md draft.gguf -p 'it'"'"'s
100%' -n 64 --results /home/me/jobs/pipeinfer-1/results.csv --trace /home/me/jobs/pipeinfer-1/trace.json
