"""Addresses, names and ports of this host. Speaks no protocol. The only package that imports psutil."""
