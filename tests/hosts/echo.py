"""Two programs that talk over TCP: `echo.py serve` says its port; `echo.py ask HOST PORT` asks when it is told to.

For each line on its stdin, a number of bytes and of seconds, the second sends that many bytes and says on stdout what came of
it: `same` and after how many seconds all that it ever sent was back, `silence` if not in that time, or what error.
"""

import os
import socket
import sys
import threading
import time


def serve() -> None:
    """Send back whatever comes."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()


def answer(connection: socket.socket) -> None:
    """Send back whatever one client sends."""
    with connection:
        while got := connection.recv(1 << 16):
            connection.sendall(got)


def ask(host: str, port: str) -> None:
    """Ask as told."""
    connection = socket.create_connection((host, int(port)), timeout=10)
    print(connection.getpeername()[0], flush=True)
    owed = bytearray()
    for line in sys.stdin:
        size, patience = line.split()
        began = time.monotonic()
        connection.settimeout(float(patience))
        sent = os.urandom(int(size))
        owed += sent
        # both ways at once: buffers have an end
        threading.Thread(target=send, args=(connection, sent), daemon=True).start()
        try:
            word = "same" if all_back(connection, owed) else "other"
            print(f"{word} {time.monotonic() - began:.4f}", flush=True)
        except TimeoutError:
            print("silence", flush=True)
        except OSError as error:
            print(type(error).__name__, flush=True)


def send(connection: socket.socket, sent: bytes) -> None:
    """Send; how it went shows in what comes back."""
    try:
        connection.sendall(sent)
    except OSError:
        pass


def all_back(connection: socket.socket, owed: bytearray) -> bool:
    """Receive all that is owed, and tell whether it was right."""
    right = True
    while owed:
        if not (got := connection.recv(1 << 16)):
            raise ConnectionResetError
        right = right and owed.startswith(got)
        del owed[: len(got)]
    return right


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else ask(*sys.argv[2:])
