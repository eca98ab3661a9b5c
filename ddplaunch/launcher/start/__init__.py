"""From a JobSpec, or an order of another ddplaunch, to an exit status: on this node, over ssh, or as a Slurm step.

Reads no command line and prints nothing but a plan.
"""
