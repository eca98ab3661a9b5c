"""A job warns of its nodes whose machine has failed lately, until they are forgotten."""

import os
import re
import time

from ddplaunch.runlog import bad_nodes
from ddplaunch.runlog.bad_nodes import Failure
from ddplaunch.runlog.folders import bad_nodes_file

HOST = os.uname().nodename


def test_a_job_warns_of_its_node_until_that_is_forgotten(job):
    (job.home / "train.py").touch()

    def said(*words):
        job.start(*words)
        return job.wait().expect(0)

    path, now = bad_nodes_file(job.env), time.time()
    failures = [
        Failure(host=host, kind="gpu", at=now - 3600, run="20261123-194501-k7qx", why="Xid 79")
        for host in (HOST, "other")
    ]
    bad_nodes.add(path, failures, now)
    assert f"ddplaunch: warning: {HOST} had a fault of a GPU 1 h ago" in said("train.py").err
    assert "other" not in said("-q", "train.py").err
    assert re.search(
        rf"^{re.escape(HOST)} +had a fault of a GPU 1 h ago  run k7qx  Xid 79$",
        said("doctor", "--nodes").out,
        re.MULTILINE,
    )
    assert '"kind": "gpu"' in said("doctor", "--nodes", "--json").out
    assert said("doctor", "--forget", HOST).out == f"forgot 1 failure of {HOST}\n"
    assert "warning" not in said("train.py").err
    job.start("doctor", "--forget", "nowhere")
    result = job.wait().expect(2)
    assert result.err == (
        "error: --forget nowhere: no failure of this node is remembered\n\n"
        "hint: `ddplaunch doctor --nodes` shows all that is remembered\n"
    )
