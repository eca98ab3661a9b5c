"""`--debugpy`: ranks wait for a client, which this test is: it speaks the Debug Adapter Protocol as VS Code does."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ddplaunch.launcher.start.node import check_debugpy
from tests.conftest import until
from tests.process.dap import Client

NOBODY = 54321  # a user without an entry in the user database
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
needs_debugpy = pytest.mark.skipif(importlib.util.find_spec("debugpy") is None, reason="debugpy is not installed")


@needs_debugpy
def test_a_client_connects_by_the_printed_launch_json_stops_at_a_breakpoint_and_goes_on(job, program):
    target = program("debugpy_target")
    line = 1 + next(n for n, text in enumerate(Path(target).read_text().splitlines()) if "# BREAK" in text)
    with (job.home / "err").open("wb") as err:
        job.start("--debugpy", "0,1", "--nproc-per-node", 2, "--timeout", 600, target, stderr=err)
    written = until(
        lambda: re.search(r"launch\.json:\n(\{.*\n\})\n", (job.home / "err").read_text(), re.DOTALL), "launch.json"
    )
    launch = json.loads(written[1])
    assert launch["compounds"][0]["configurations"] == ["rank 0", "rank 1"]
    clients = []
    for rank, configuration in enumerate(launch["configurations"]):
        assert (configuration["type"], configuration["request"]) == ("debugpy", "attach")
        assert configuration["connect"]["host"] == "127.0.0.1"
        client = Client(configuration["connect"]["port"])
        clients.append(client)
        client.answer("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True)
        attach = client.ask("attach", **configuration)
        client.sees(type="event", event="initialized")
        client.answer("setBreakpoints", source={"path": str(target)}, breakpoints=[{"line": line}])
        client.answer("configurationDone")
        client.sees(type="response", request_seq=attach, success=True)
        thread = client.sees(type="event", event="stopped")["body"]["threadId"]
        frame = client.answer("stackTrace", threadId=thread)["stackFrames"][0]
        assert (frame["source"]["path"], frame["line"]) == (str(target), line)
        assert client.answer("evaluate", expression="answer", frameId=frame["id"])["result"] == str(41 + rank)
        client.ask("continue", threadId=thread)
    result = job.wait()
    for client in clients:
        client.close()
    assert result.status == 0, (job.home / "err").read_text()
    assert sorted(result.out.splitlines()) == ["[0] the answer of rank 0 is 41", "[1] the answer of rank 1 is 42"]


# as another user: whatever arrives within some seconds after the first request of a client, which is then closed or kept open
STRANGER = """
import encodings.idna, os, socket, sys
os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60)
body = b'{"seq":1,"type":"request","command":"initialize","arguments":{"adapterID":"debugpy"}}'
sock.sendall(b"Content-Length: %d\\r\\n\\r\\n%s" % (len(body), body))
try:
    print(sock.recv(100))
except ConnectionResetError:
    print(b"")
"""


def heard(port: int, uid: int) -> str:
    """What a client of this user hears at a port, b'' for a connection that is closed."""
    command = [sys.executable, "-c", STRANGER, str(port), str(uid)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@needs_debugpy
@root_only
def test_another_user_never_reaches_the_debugger_also_after_its_client_has_left(job, program):
    with (job.home / "err").open("wb") as err:
        job.start("--debugpy", "0", "--timeout", 600, program("behave"), "all=done_when_told", stderr=err)
    written = until(lambda: re.search(r'"port": (\d+)', (job.home / "err").read_text()), "the port")
    port = int(written[1])
    assert heard(port, NOBODY) == "b''"
    client = Client(port)
    client.answer("initialize", adapterID="debugpy", pathFormat="path", linesStartAt1=True)
    attach = client.ask("attach", name="rank 0", type="debugpy", request="attach")
    client.sees(type="event", event="initialized")
    client.answer("configurationDone")
    client.sees(type="response", request_seq=attach, success=True)
    job.sign("ready-0")
    assert heard(port, NOBODY) == "b''"
    lines = command_lines(job.home)
    assert any("own_user.py" in line for line in lines)
    assert not any("--server-access-token" in line for line in lines)  # which all users could read
    client.answer("disconnect", terminateDebuggee=False)
    client.close()
    assert heard(port, NOBODY) == "b''"
    assert "Content-Length" in heard(port, 0)
    (job.home / "signs" / "go").touch()
    assert job.wait().status == 0, (job.home / "err").read_text()


def command_lines(home: Path) -> list[str]:
    """The command lines of the processes of the job with this home."""
    lines = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.fsencode(home) in Path(f"/proc/{pid}/environ").read_bytes():
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"))
    return lines


@needs_debugpy
def test_the_check_for_debugpy_runs_nothing_of_the_working_directory(tmp_path, monkeypatch):
    for name in ("importlib", "contextlib", "types", "warnings", "functools", "debugpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    check_debugpy(sys.executable, dict(os.environ))
    assert not (tmp_path / "ran").exists()


def test_an_interpreter_without_debugpy_is_named_with_what_to_type(job, program):
    python = job.home / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 1\nexit 7\n')
    python.chmod(0o755)
    result = job.run("--debugpy", "--python", python, program("debugpy_target")).expect(2)
    assert result.err == (
        f"error: --debugpy needs debugpy, which {python} does not have\n\nhint: {python} -m pip install debugpy\n"
    )
    assert job.run("--debugpy", "5", program("debugpy_target")).err.startswith("error: --debugpy: there is no rank 5")
