#!/bin/bash
#SBATCH --job-name='two words'
#SBATCH --qos=high
#SBATCH --chdir=/home/me
#SBATCH --output='/home/me/jobs/two words-1/text'
#SBATCH --error='/home/me/jobs/two words-1/log'
#SBATCH --no-requeue
#SBATCH --exclusive
#SBATCH --nodes=4
#SBATCH --ntasks=8
#SBATCH --gpus-per-task=h100:1
#SBATCH --constraint=fast

set -e
module load gcc/12 mpich/4
source env.sh
export X=1
exec srun -X --mpi=pmix -n 8 /env/bin/pipeinfer bench -m target.gguf -md draft.gguf -ngl all --results mine.csv
