"""A client that speaks the Debug Adapter Protocol, as VS Code does, and does what VS Code does in a session."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.conftest import PATIENCE, until


class Client:
    """A client of debugpy's adapter."""

    def __init__(self, port: int) -> None:
        self._sock = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._file = self._sock.makefile("rb")
        self._last = 0
        self._seen: list[dict[str, Any]] = []

    def ask(self, command: str, **arguments: Any) -> int:
        """Send a request; give its number."""
        self._last += 1
        body = json.dumps({"seq": self._last, "type": "request", "command": command, "arguments": arguments}).encode()
        self._sock.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self._last

    def sees(self, **wanted: Any) -> dict[str, Any]:
        """Wait for a message with these fields, which may have come already; give it."""
        while True:
            for message in self._seen:
                if wanted.items() <= message.items():
                    self._seen.remove(message)
                    return message
            length = 0
            while line := self._file.readline().strip():
                length = int(line.split(b":")[1])
            if not length:
                raise EOFError(f"the connection ended before {wanted}")
            self._seen.append(json.loads(self._file.read(length)))

    def answer(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and give the body of what it is answered with."""
        reply = self.sees(type="response", request_seq=self.ask(command, **arguments))
        assert reply["success"], reply
        return dict(reply.get("body") or {})

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._sock.close()


class Editor:
    """A session of one breakpoint, with a thread for each process: it goes into each process that it is told of."""

    def __init__(self, file: Path) -> None:
        """Stop in `file`, at the line with BREAK in it."""
        self._file = file
        self._line = 1 + next(n for n, line in enumerate(file.read_text().splitlines()) if "# BREAK" in line)
        self._threads: list[threading.Thread] = []
        self._goes_on = threading.Event()
        self._clients: dict[int, Client] = {}  # of the processes that were named to us, by pid, and 0 for the first
        self.hits: list[tuple[int, str]] = []  # pid, and what its variable `here` held
        self.output = ""
        self.errors: list[BaseException] = []

    def begin(self, port: int, request: str, **configuration: Any) -> None:
        """Begin the session by this request to the adapter at a port."""
        self._start(port, request, configuration, 0)

    def stopped(self, times: int) -> list[str]:
        """Wait until this many processes are held at the breakpoint; give what `here` is in each, sorted."""
        until(lambda: len(self.hits) >= times or self.errors, f"{times} processes at the breakpoint")
        self.check()
        return sorted(here for _, here in self.hits)

    def go_on(self) -> None:
        """Have all that are held go on, and all that come later."""
        self._goes_on.set()

    def stop(self) -> None:
        """End the session as the red square does: all processes are to end."""
        for client in list(self._clients.values()):
            client.ask("disconnect", terminateDebuggee=True)
        self.go_on()

    def wait(self) -> None:
        """Wait until all processes have ended for us."""
        self.go_on()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        self.check()

    def check(self) -> None:
        """Raise what a thread of ours has raised."""
        for error in self.errors:
            raise error

    @property
    def followed(self) -> list[int]:
        """The processes below the first one."""
        return [pid for pid in self._clients if pid]

    def _start(self, port: int, request: str, configuration: Mapping[str, Any], pid: int) -> None:
        self._clients[pid] = Client(port)
        arguments = (self._clients[pid], request, configuration, pid)
        thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, client: Client, request: str, configuration: Mapping[str, Any], pid: int) -> None:
        try:
            client.answer("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True)
            client.ask(request, **configuration)
            while (event := client.sees(type="event"))["event"] != "terminated":
                self._on_event(client, event["event"], event.get("body") or {}, pid)
            client.answer("disconnect")
        except (EOFError, OSError):  # the process was killed, or its adapter has ended
            pass
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.errors.append(error)
        finally:
            client.close()

    def _on_event(self, client: Client, event: str, body: Mapping[str, Any], pid: int) -> None:
        match event:
            case "initialized":
                place = {"path": str(self._file)}
                client.answer("setBreakpoints", source=place, breakpoints=[{"line": self._line}])
                client.answer("configurationDone")
            case "debugpyAttach":
                self._start(body["connect"]["port"], "attach", body, body["subProcessId"])
            case "output" if body["category"] in ("stdout", "stderr"):
                self.output += body["output"]
            case "stopped":
                frame = client.answer("stackTrace", threadId=body["threadId"])["stackFrames"][0]
                here = client.answer("evaluate", expression="here", frameId=frame["id"])["result"]
                assert (frame["source"]["path"], frame["line"]) == (str(self._file), self._line)
                self.hits.append((pid, here.strip("'")))
                assert self._goes_on.wait(PATIENCE)
                client.ask("continue", threadId=body["threadId"])
