"""Addresses, names and ports of this host. Knows no protocol."""
