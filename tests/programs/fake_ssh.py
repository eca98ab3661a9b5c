"""An ssh for tests: hosts are folders of this machine, and those whose names say so misbehave as real ones do.

It keeps what matters of the real one: the remote command runs in a session of its own, in the user's home, with another
environment; it is reached only through the connection, and learns of the client's death only by the end of it.
"""

import os
import socket
import subprocess
import sys
import threading
import time

SAYS = {  # what OpenSSH prints before it ends with 255
    "unknown": "ssh: Could not resolve hostname unknown: Name or service not known",
    "refusing": "ssh: connect to host refusing port 22: Connection refused",
    "silent": "ssh: connect to host silent port 22: Connection timed out",
    "stranger": "No ED25519 host key is known for stranger and you have requested strict checking.\n"
    "Host key verification failed.",
    "locked": "ann@locked: Permission denied (publickey,password).",
}


def arguments(words):
    """Split into options and the rest, as ssh does."""
    options = []
    while words[0].startswith("-"):
        options.append(words.pop(0))
        if options[-1] == "-o":
            options[-1] = words.pop(0)
    return options, words[0].rpartition("@")[2], words[1]


def copy(source, take, close):
    while data := os.read(source, 65536):
        take(data)
    close()


def main():
    options, host, command = arguments(sys.argv[1:])
    folder = os.environ["FAKE_SSH"]
    with open(os.path.join(folder, f"{host}.called"), "w") as file:
        file.write("\n".join([*options, command]))
    if host in SAYS:
        print(SAYS[host], file=sys.stderr)
        sys.exit(255)
    if host == "off":
        while not os.path.exists(os.path.join(folder, "off.noticed")):
            time.sleep(0.01)
        print("ssh: connect to host off port 22: No route to host", file=sys.stderr)
        sys.exit(255)
    if host == "hanging":
        threading.Event().wait()
    ours, theirs = socket.socketpair()
    home = os.path.join(folder, "home")
    os.makedirs(home, exist_ok=True)
    env = {
        "HOME": home,
        "USER": "ann",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "SSH_CONNECTION": f"127.0.0.1 50000 {host} 22",
        "DDP_TEST_MARK": os.environ["DDP_TEST_MARK"],
        "PYTHONPATH": os.environ.get("FAKE_SSH_PYTHONPATH", ""),
    }
    if host == "chatty":
        command = f"echo Welcome to chatty; printf 'no newline'; echo and a warning >&2; {command}"
    if host == "bare":  # all hosts have the same files here, so that what it lacks goes when it is called
        os.rename(os.environ["FAKE_SSH_LACKS"], os.environ["FAKE_SSH_LACKS"] + ".gone")
    if host == "old":
        command = "printf '\\0ddplaunch-remote 1 0.0.1\\n'; cat >/dev/null"
    if host == "lying":
        command = f"cat {folder}/lies; cat >/dev/null"
    shell = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=theirs, stdout=theirs, env=env, cwd=home, start_new_session=True
    )
    theirs.close()
    with open(os.path.join(folder, f"{host}.pids"), "w") as file:
        file.write(f"{os.getpid()} {shell.pid}")
    close = lambda: ours.shutdown(socket.SHUT_WR)  # noqa: E731
    threading.Thread(target=copy, args=(0, ours.sendall, close), daemon=True).start()
    copy(ours.fileno(), lambda data: sys.stdout.buffer.write(data) and sys.stdout.flush(), lambda: None)
    sys.exit(shell.wait())


main()
