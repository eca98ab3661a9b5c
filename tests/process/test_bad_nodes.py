"""A job warns of its nodes whose machine has failed lately, until they are forgotten."""

import os
import re
import time

from ddplaunch.plan.cluster.listed import HAS_FAILED
from ddplaunch.record import bad_nodes
from ddplaunch.record.bad_nodes import Failure
from ddplaunch.record.folders import bad_nodes_file

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
    assert f"{HOST} had a fault of a GPU 1 h ago" in said("plan", "train.py").out
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


def test_a_list_that_cannot_be_used_is_named_once_and_by_the_doctor(job):
    (job.home / "train.py").touch()
    path = bad_nodes_file(job.env)
    os.makedirs(path)
    said = f"the list of nodes that have failed cannot be used: {path}: not a regular file"
    for words in ([], ["--avoid-bad-nodes"]):
        job.start(*words, "train.py")
        assert job.wait().expect(0).err.count(f"ddplaunch: warning: {said}\n") == 1
    job.start("-q", "--avoid-bad-nodes", "train.py")
    assert job.wait().expect(0).err == ""
    for words in (["--nodes"], ["--forget", HOST]):
        job.start("doctor", *words)
        assert job.wait().expect(2).err == f"error: {said}\n\nhint: `mv {path} {path}.old` begins a new list\n"


def test_hosts_that_are_left_out_are_named(job):
    (job.home / "train.py").touch()
    now = time.time()
    bad_nodes.add(bad_nodes_file(job.env), [Failure(host="gone", kind="lost", at=now)], now)
    avoiding = ("--hosts", "gone,localhost", "--avoid-bad-nodes")
    said = f"--avoid-bad-nodes leaves out gone: {HAS_FAILED}"
    job.start(*avoiding, "train.py")
    assert f"ddplaunch: warning: {said}\n" in job.wait().expect(0).err
    job.start("plan", *avoiding, "train.py")
    assert said in " ".join(job.wait().expect(0).out.split())
    job.start("-q", *avoiding, "train.py")
    assert job.wait().expect(0).err == ""
