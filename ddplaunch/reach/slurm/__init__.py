"""The commands of Slurm that a job and other tools run: scontrol, and srun for a step."""
