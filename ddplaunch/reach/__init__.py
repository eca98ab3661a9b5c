"""How another host is reached, by a job and by other tools: connections, orders, the channel between agents, steps of Slurm."""
