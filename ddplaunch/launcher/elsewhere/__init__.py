"""Jobs whose agents ddplaunch starts itself, over ssh or as simulated nodes: `dispatcher` here, `host_front` on each host.

Decides nothing about workers, puts no secret into a command line, and imports nothing here: an agent has to start quickly.
"""
