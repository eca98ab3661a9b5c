"""A job in a Slurm allocation: a step of agents that srun starts, and the command that watches it.

It reads no Slurm environment to find the nodes of a job: `plan/cluster/slurm.py` does.
"""
