#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --cpus-per-task=4
#SBATCH --time=00:10:00
#SBATCH --signal=USR1@120          # sent two minutes before the end: the time to finish a step and to save
#SBATCH --requeue                  # the job may go back into the queue
#SBATCH --open-mode=append         # and its output then goes on in the same file
#SBATCH --output=digits-%j.out

# On nodes with GPUs leave --nproc-per-node out: there is one worker for each GPU.
ddplaunch --requeue-on USR1 --nproc-per-node 2 train.py --checkpoint "digits-$SLURM_JOB_ID.pt"
