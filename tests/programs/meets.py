"""Workers that meet at MASTER_PORT as a store and its client do; rank 0 closes first, so that its side lingers."""

import os
import socket

from signs import RANK, put, wait

address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if RANK == 0:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        put(f"listening-{os.environ['DDPLAUNCH_RUN_ID']}")
        connection, _ = server.accept()
        connection.send(b"hello")
        connection.close()
else:
    wait(f"listening-{os.environ['DDPLAUNCH_RUN_ID']}")
    with socket.create_connection(address) as client:
        assert client.recv(5) == b"hello"
        assert client.recv(5) == b""
