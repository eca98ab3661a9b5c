"""How a worker asks its agent, at an abstract address, for the descriptors of a terminal or a client. Loaded when needed."""

import os
import socket
import struct

CREDENTIALS = struct.Struct("iII")  # struct ucred, unix(7)


def ask(address: str, what: str) -> "socket.socket | None":
    """Connect to the agent and send `what`; return the connection, None if this user has no agent."""
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        agent.connect("\0" + address)
        uid = CREDENTIALS.unpack(agent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
        if uid in (os.getuid(), 0):
            agent.sendall(what.encode("utf-8", "replace"), socket.MSG_NOSIGNAL)
            return agent
    except OSError:
        pass
    agent.close()
    return None


def receive(agent: socket.socket, most: int) -> "tuple[bytes, list[int]]":
    """Wait for a word and at most `most` descriptors from the agent; return both, without descriptors if the agent refuses."""
    number = struct.Struct("i")
    try:
        word, ancillary, _, _ = agent.recvmsg(16, socket.CMSG_SPACE(most * number.size))
    except OSError:
        return b"", []
    fds = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds += [fd for (fd,) in number.iter_unpack(data[: len(data) // number.size * number.size])]
    return word, fds


def meet(address: str) -> "tuple[bytes, socket.socket, socket.socket] | None":
    """Return the wish of the client for which the agent has sent a signal, and both sockets; None if the client has gone."""
    agent = ask(address, "A")
    if agent is None:
        return None
    wish, fds = receive(agent, 1)
    if not fds:
        agent.close()
        return None
    return wish, socket.socket(fileno=fds[0]), agent
