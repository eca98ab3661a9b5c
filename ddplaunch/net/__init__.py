"""Addresses, names and ports of this host. Speaks no protocol. psutil lives here and nowhere else."""
