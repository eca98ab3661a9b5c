"""All that runs a command of Slurm: scontrol, srun (a step with an agent on each node), sbatch (`submit/`).

It reads no Slurm environment to find the nodes of a job: `cluster/slurm.py` does.
"""
