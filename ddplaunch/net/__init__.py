"""Addresses, names and ports of this host. Knows no protocol. The only package that imports psutil."""
