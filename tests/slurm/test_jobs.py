"""Jobs in Slurm: the ways to start one, what the workers are told, several at once, and what cannot work."""

import os
import pty
import shlex

import pytest
from pexpect import fdpexpect

from tests.conftest import PATIENCE, PROGRAMS
from tests.slurm.job import SlurmJob
from tests.slurm.places import PLACE, done, expected, places, seats
from tests.slurm.started import EACH, EVERY_WAY, NODES, RANKS, batch, one_cluster

__all__ = ["one_cluster"]

TOGETHER = PROGRAMS / "together.py"


def refused(job: SlurmJob, script: str, *options: str) -> str:
    """Run a script that should end with the status of wrong usage and start nothing; give its output."""
    failed = job.sbatch(script, *options)
    assert (failed.wait(), failed.exit_code()) == ("FAILED", 2), failed.output()
    assert not places(job)
    return failed.output()


# --- the ways to start


@EVERY_WAY
def test_workers_are_told_who_and_where_they_are(job: SlurmJob, way: str) -> None:
    output = done(batch(job, way, PLACE))
    assert seats(job) == expected()
    for name, value in (("MASTER_ADDR", "node1"), ("GLOO_SOCKET_IFNAME", "eth0")):
        assert {place[name] for place in places(job)} == {value}
    for name in ("MASTER_PORT", "DDPLAUNCH_RUN_ID"):
        assert len({place[name] for place in places(job)}) == 1
    assert not [name for place in places(job) for name in place if "TOKEN" in name or "MEETING" in name]
    assert f"{RANKS} workers on {NODES} nodes finished" in output


def test_a_variable_from_a_file_stands_in_no_command_line(job: SlurmJob) -> None:
    secrets = job.home / "train.env"
    secrets.write_text("SECRET=s3cret: v4lue\n")
    done(batch(job, "a step of its own", PROGRAMS / "sees_argv.py", flags=f"--env-file {secrets}"))
    assert job.signs("seen", RANKS) == ["s3cret: v4lue"] * RANKS


def test_the_shell_of_an_allocation_starts_them_too(job: SlurmJob) -> None:
    job.salloc(f"{job.ddplaunch} --nproc-per-node {EACH} {PLACE}", f"--nodes={NODES}").expect(0)
    assert seats(job) == expected()


# --- how many nodes and workers


def test_one_node_gets_a_step_too_but_needs_none(job: SlurmJob) -> None:
    done(job.sbatch(f"{job.ddplaunch} --nproc-per-node 2 {PLACE}", "--nodes=1"))
    assert seats(job) == expected(nodes=1)
    assert {place["SLURM_STEP_ID"] for place in places(job)} == {"0"}
    done(job.sbatch(f"PATH=/nowhere {job.ddplaunch} --nproc-per-node 2 {PLACE}", "--nodes=1"))
    assert seats(job) == expected(nodes=1)
    assert "SLURM_STEP_ID" not in places(job)[0]


def test_rank_0_of_one_node_reads_what_the_command_is_given(job: SlurmJob) -> None:
    (job.home / "reads.py").write_text("import sys\nprint('read', sys.stdin.read())\n")
    output = done(job.sbatch(f"echo this | {job.ddplaunch} --nproc-per-node 1 reads.py", "--nodes=1"))
    assert "read this\n" in output


def test_a_loop_over_the_lines_of_a_file_goes_on_where_no_worker_reads(job: SlurmJob) -> None:
    """srun would read all of it ahead; a worker that reads takes what it reads."""
    (job.home / "lines").write_text("a\nb\nc\n")
    command = f"{job.ddplaunch} -q --nproc-per-node 1 --no-python"
    loop = f"while read -r line; do {command} echo round $line; {command} head -c0; done < lines"
    output = done(job.sbatch(loop, "--nodes=1"))
    assert [line for line in output.splitlines() if line.startswith("round")] == ["round a", "round b", "round c"]


def test_one_node_from_the_shell_of_an_allocation_elsewhere(job: SlurmJob) -> None:
    job.salloc(f"{job.ddplaunch} --nproc-per-node 2 {PLACE}", "--nodes=1").expect(0)
    assert seats(job) == expected(nodes=1)


@pytest.mark.parametrize("nodes", [1, 2])
def test_fewer_nodes_than_there_are(job: SlurmJob, nodes: int) -> None:
    # --gpus is a number for the whole job, which two of three nodes do not have
    options = ("--nodes=3", "--gpus=12", "--exclusive")
    done(job.sbatch(f"{job.ddplaunch} --nnodes {nodes} --nproc-per-node 2 {PLACE}", *options))
    assert seats(job) == expected(nodes)


def test_a_step_on_some_nodes_of_a_job_is_a_job_of_these(job: SlurmJob) -> None:
    done(job.sbatch(f"srun --nodes=2 --ntasks=2 {job.ddplaunch} --nproc-per-node 2 {PLACE}", "--nodes=3"))
    assert seats(job) == expected(2)


@pytest.mark.parametrize(
    ("command", "asked", "has"),
    [
        ("{} --nnodes 4", "--nnodes 4", "3 nodes: node[1-3]"),
        ("srun {} --nnodes 2", "--nnodes 2", "3 nodes"),
        ("srun --ntasks=6 --overcommit {} --nproc-per-node 3", "--nproc-per-node 3", "once for each rank"),
        ("{} --node-rank 1", "--node-rank 1", "ddplaunch starts all nodes"),
    ],
)
def test_what_disagrees_with_the_allocation_is_refused(job: SlurmJob, command: str, asked: str, has: str) -> None:
    output = refused(job, f"{command.format(job.ddplaunch)} {PLACE}", "--nodes=3")
    assert asked in output
    assert has in output
    assert "hint: " in output


OTHER_REASONS = (
    ("--ntasks=5", "--hint=nomultithread", "--job-name=bash"),
    ("--ntasks-per-node=2", "--gpus-per-task=2", "--cpus-per-task=3"),
    ("--ntasks-per-node=4", "--distribution=cyclic", "--exclusive", "--mem=1000", "--gpu-bind=single:1", "--gpus=12"),
)


@pytest.mark.parametrize("options", OTHER_REASONS, ids=" ".join)
def test_options_of_the_script_that_are_for_other_things_change_nothing(job, options):
    done(job.sbatch(f"{job.ddplaunch} --nproc-per-node 2 {PLACE}", "--nodes=3", *options))
    assert seats(job) == expected(3)


def test_tasks_per_node_are_workers_where_there_is_no_gpu(job: SlurmJob) -> None:
    done(job.sbatch(f"{job.ddplaunch} {PLACE}", f"--nodes={NODES}", "--ntasks-per-node=2"))
    assert seats(job) == expected()
    assert not any(name.startswith("DDPLAUNCH_TASKS") for place in places(job) for name in place)


def test_no_command_of_slurm_but_srun_is_needed(job: SlurmJob) -> None:
    tools = job.home / "tools"
    tools.mkdir()
    (tools / "srun").symlink_to("/usr/bin/srun")
    ddplaunch, path = job.ddplaunch, shlex.quote(str(tools))
    done(job.sbatch(f"PATH={path} {ddplaunch} --nproc-per-node 2 {PLACE}", f"--nodes={NODES}"))
    assert seats(job) == expected()


# what a container may lack: Slurm's commands, its files, its daemons' sockets, and variables that were not passed on
HIDDEN = "mount -t tmpfs none /etc/slurm; mount -t tmpfs none /run"
CONTAINED = f"{HIDDEN}; unset SLURM_CONF SLURM_JOB_NAME SLURM_CLUSTER_NAME; PATH=/nowhere exec"


@pytest.mark.parametrize(("each", "after"), [(1, "--nproc-per-node 2"), (2, "")])
def test_commands_that_srun_starts_in_containers_need_nothing_of_slurm_but_variables(job, each, after):
    command = shlex.quote(f"{CONTAINED} {job.ddplaunch} {after} {PLACE}")
    script = f"srun --ntasks-per-node={each} unshare --mount sh -c {command}"
    done(job.sbatch(script, f"--nodes={NODES}", f"--ntasks-per-node={each}", "--job-name=bash"))
    assert seats(job) == expected()


def test_a_step_that_cannot_be_started_is_an_error_that_says_why(job: SlurmJob) -> None:
    failed = job.sbatch(f"PATH=/nowhere {job.ddplaunch} {PLACE}", "--nodes=3")
    assert (failed.wait(), failed.exit_code()) == ("FAILED", 127)
    assert "no step could be started: srun: No such file" in failed.output()
    assert "hint: in a container without srun let srun start the containers: " in failed.output()


def test_arguments_of_the_script_arrive_as_they_were_typed(job: SlurmJob) -> None:
    """For srun a colon by itself begins another component."""
    (job.home / "says.py").write_text("import sys\nprint(sys.argv[1:])\n")
    words = ["a", ":", "", "b c", "--nodes=7", "%t", "$HOME", "'"]
    output = done(job.sbatch(f"{job.ddplaunch} --nproc-per-node 1 says.py {shlex.join(words)}", "--nodes=2"))
    assert output.count(repr(words)) == 2, output


@pytest.mark.parametrize("tasks", [("--ntasks=4",), ("--nodes=2", "--ntasks-per-node=1")])
def test_what_is_typed_in_the_shell_of_a_step_waits_for_no_task_that_is_a_shell(job: SlurmJob, tasks) -> None:
    ours, theirs = pty.openpty()
    shell = job.start_srun("--pty", *tasks, "bash", "--norc", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    terminal = fdpexpect.fdspawn(ours, timeout=PATIENCE)
    terminal.send(f"{job.ddplaunch} --backend gloo {PLACE}; echo the status is $?\n")
    terminal.expect(r"the status is (\d+)")
    assert terminal.match[1] == b"0", terminal.before
    terminal.send("exit 0\n")
    assert shell.wait(PATIENCE) == 0
    os.close(ours)
    assert {place["WORLD_SIZE"] for place in places(job)} == ({"1"} if len(tasks) == 1 else {"2"})
    assert len({place["SLURMD_NODENAME"] for place in places(job)}) == len(places(job))
    job.nothing_left(10)


# --- heterogeneous jobs

# the first component is on the last node, with GPUs and tasks of its own
COMPONENTS = ("--nodelist=node3", "--gpus=2", "--cpus-per-task=2", ":", "--nodelist=node[1-2]")
HETEROGENEOUS = ("--ntasks-per-node=2", *COMPONENTS)


def in_turn(each: int) -> list[tuple[str, ...]]:
    """What `seats` should be where nodes count from component to component."""
    hosts = [host for host in ("node3", "node1", "node2") for _ in range(each)]
    return [(host, *seat[1:]) for host, seat in zip(hosts, expected(3, each), strict=True)]


@pytest.mark.parametrize(("before", "options"), [("", HETEROGENEOUS), ("srun --het-group=0,1", COMPONENTS)])
def test_a_heterogeneous_job_is_one_job_on_the_nodes_of_all_components(job, before, options):
    done(job.sbatch(f"{before} {job.ddplaunch} --nproc-per-node 2 {PLACE}", *options))
    assert seats(job) == in_turn(2)
    assert {place["MASTER_ADDR"] for place in places(job)} == {"node3"}


def test_a_task_for_each_rank_of_a_heterogeneous_job(job: SlurmJob) -> None:
    """Its components have different numbers of tasks."""
    done(job.sbatch(f"srun --het-group=0,1 {job.ddplaunch} --backend gloo {PLACE}", *HETEROGENEOUS))
    places = [(host, rank, local_rank, node_rank) for host, rank, local_rank, node_rank, _, _ in seats(job)]
    first = [("node3", "0", "0", "0"), ("node3", "1", "1", "0")]
    assert places == [*first, ("node1", "2", "0", "1"), ("node2", "3", "0", "2")]


def test_the_shell_of_a_heterogeneous_allocation_starts_all_components(job: SlurmJob) -> None:
    job.salloc(f"{job.ddplaunch} --nnodes 2 --nproc-per-node 2 {PLACE}", *HETEROGENEOUS).expect(0)
    assert seats(job) == [(*seat[:4], "4", "2") for seat in in_turn(2)[:4]]


@pytest.mark.parametrize(("after", "each"), [("--nproc-per-node 2", 1), ("", 2)])
def test_tasks_may_be_put_on_nodes_in_any_order(job: SlurmJob, after: str, each: int) -> None:
    hosts = [host for host in ("node3", "node1", "node2") for _ in range(each)]
    (job.home / "hosts").write_text("\n".join(hosts) + "\n")
    done(job.sbatch(f"export SLURM_HOSTFILE=hosts\nsrun --distribution=arbitrary {job.ddplaunch} {after} {PLACE}",
                    "--nodes=3", "--ntasks-per-node=2"))  # fmt: skip
    assert {(seat[0], seat[3]) for seat in seats(job)} == {("node1", "0"), ("node2", "1"), ("node3", "2")}
    first = seats(job)[0][0]
    assert first == ("node1" if after else "node3")


# --- several at once


def test_two_elements_of_an_array_run_at_once_on_the_same_nodes(job: SlurmJob) -> None:
    script = f"{job.ddplaunch} --nproc-per-node 1 {TOGETHER} $SLURM_ARRAY_TASK_ID 0 1"
    array = job.sbatch(script, "--nodes=2", "--array=0-1")
    for index in (0, 1):
        done(array.element(index))


def test_two_jobs_and_two_steps_of_each_run_at_once_on_the_same_nodes(job: SlurmJob) -> None:
    def script(*names: str) -> str:
        started = "".join(
            f'{job.ddplaunch} --nproc-per-node 1 {TOGETHER} {name} a b c d & pids="$pids $!"\n' for name in names
        )
        return f"{started}for pid in $pids; do wait $pid || exit; done\n"

    jobs = [job.sbatch(script(*names), "--nodes=2") for names in ("ab", "cd")]
    for one in jobs:
        done(one)


def test_eight_tasks_say_once_what_is_wrong_with_their_line(job: SlurmJob) -> None:
    result = job.srun("--ntasks=8", "--nodes=2", *job.argv("--nosuch", PLACE))
    assert (result.status, result.err.count("--nosuch is not an option")) == (2, 1), result.err
