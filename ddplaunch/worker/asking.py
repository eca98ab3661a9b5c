"""How a worker asks its agent, at an abstract Unix address, for descriptors: of a terminal, or of a client that has come."""

import os
import socket
import struct

CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred, unix(7)
DESCRIPTOR = struct.Struct("i")
# how a question begins: an exception ends the program; a client comes, for which the agent has sent a signal; debugpy listens at
# a port (the same in launcher/look/debuggers.py)
HAS_FAILED, COMES_FOR_CLIENT, LISTENS_FOR_DEBUGPY = "E", "A", "P"


def ask(address: str, question: str) -> "socket.socket | None":
    """Connect to the agent and ask; return the connection, None if no agent of this user or of root listens there.

    A question begins with HAS_FAILED, COMES_FOR_CLIENT or LISTENS_FOR_DEBUGPY.
    """
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        agent.connect("\0" + address)
        credentials = agent.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        _pid, uid, _gid = CREDENTIALS.unpack(credentials)
        if uid in (os.getuid(), 0):
            agent.sendall(question.encode("utf-8", "replace"), socket.MSG_NOSIGNAL)
            return agent
    except OSError:
        pass
    agent.close()
    return None


def receive(agent: socket.socket, most: int) -> "tuple[bytes, list[int]]":
    """Wait for the answer of the agent, a word and at most `most` descriptors; without descriptors the agent refuses."""
    try:
        word, ancillary, _, _ = agent.recvmsg(16, socket.CMSG_SPACE(most * DESCRIPTOR.size))
    except OSError:
        return b"", []
    fds = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) // DESCRIPTOR.size * DESCRIPTOR.size
            fds += [fd for (fd,) in DESCRIPTOR.iter_unpack(data[:whole])]
    return word, fds


def fetch_client(address: str) -> "tuple[bytes, socket.socket, socket.socket] | None":
    """Ask for the client for which the agent has sent a signal; return its wish, its socket, and the socket to the agent.

    None: the client has gone.
    """
    agent = ask(address, COMES_FOR_CLIENT)
    if agent is None:
        return None
    wish, fds = receive(agent, 1)
    if not fds:
        agent.close()
        return None
    return wish, socket.socket(fileno=fds[0]), agent
