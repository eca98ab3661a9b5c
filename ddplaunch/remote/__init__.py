"""Jobs whose agents we start ourselves, on other hosts or as simulated nodes: the command that was typed is the front of all.

`hosts` starts them one by one: `fan` is the loop behind the front, `branch` the way to one host, `__main__` and `relay` what
runs there. `slurm` has srun start them: `step` is the loop, `task` what runs on each node. Nothing secret stands in a command
line. Here nothing is imported, since what starts on many hosts has to be quick.
"""
