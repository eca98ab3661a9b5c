"""The store alone, and of that the connection."""

import socket
import time


class TCPStore:
    """A listening socket, or one that connects as soon as there is one."""

    def __init__(self, host_name, port, world_size=None, is_master=False, wait_for_workers=True, multi_tenant=False):
        if is_master:
            self.socket = socket.create_server(("", port))
            return
        while True:
            try:
                self.socket = socket.create_connection((host_name, port))
                return
            except ConnectionRefusedError:
                time.sleep(0.01)
