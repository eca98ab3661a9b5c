"""The control channel between agents of different nodes: frames and handshake are pure, the rest are sockets in a loop.

Knows nothing of jobs: bytes in, bytes out. Imported only for a job of several nodes.
"""
