"""Everything that runs a command of Slurm: scontrol, srun (a step of agents), sbatch (`submit/`).

How a Slurm environment is recognised is in `cluster/slurm.py`, beside its siblings.
"""
