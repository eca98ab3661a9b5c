"""Breaks of the code, one line each, that the tests must catch: `make breaks`, or `python -m tests.breaks NUMBER...`.

After the code or the tests have been reorganised, the tests are worth as much as before if they still catch all of them. Each
break is made in a copy of the checkout, and the tests beside it are run there until the first one fails.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("ddplaunch", "docs", "examples", "tests", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "pyproject.toml")
PATIENCE = 600  # seconds for the tests of one break


class Break(NamedTuple):
    """One line of the package that is replaced by a wrong one."""

    file: str  # below ddplaunch/
    right: str  # stands there once
    wrong: str
    tests: str  # the files or folders below tests/ that must fail, with options of pytest


BREAKS = (
    # the plan
    Break("plan/ranks.py", "return [range(end - agent.workers, end)", "return [range(end - agent.workers + 1, end + 1)", "unit/plan"),
    Break("plan/ranks.py", 'if asked == "gpu" and not devices:', 'if asked == "gpu" and devices:', "unit/plan cli/test_plan.py"),
    Break("plan/variables.py", '"GROUP_RANK": str(node_rank)', '"GROUP_RANK": str(rank)', "unit/plan"),
    Break("plan/variables.py", "str(plan.requeues + generation)", "str(generation)", "unit/plan"),
    Break("plan/assign.py", "devices[i % len(devices)]", "devices[0]", "unit/plan"),
    Break("plan/cluster/hostlist.py", "found.append(_Range(range(low, high + 1)", "found.append(_Range(range(low, high)", "unit/cluster"),
    Break("plan/cluster/hostlist.py", "if high < low:", "if False:", "unit/cluster"),
    Break("plan/cluster/mpi.py", "world.rank % nodes if round_robin else", "world.rank % nodes if not round_robin else", "unit/cluster"),
    # the workers of a node
    Break("launcher/decide/node/teardown.py", "deadline = at + state.policy.grace_period", "deadline = at", "unit/supervise"),
    Break("launcher/decide/node/teardown.py", "in_debugger = state.terminal_holder if", "in_debugger = frozenset() if", "unit/supervise"),
    Break("launcher/decide/first_failure.py", "key=lambda end: (failed_at(end), end.rank)", "key=lambda end: end.rank", "unit/supervise"),
    Break("launcher/decide/first_failure.py", "end.stopped_at is not None and raised_at < end.stopped_at", "False", "unit/supervise"),
    # the job
    Break("launcher/decide/job/restarts.py", "short_lives=self.short_lives + 1 if", "short_lives=self.short_lives if", "unit/supervise"),
    Break("launcher/decide/job/ending.py", "len(state.members) < policy.min_nodes", "len(state.members) <= policy.min_nodes", "unit/supervise"),
    Break("launcher/decide/job/ending.py", "return exitcodes.of_signal(state.signum)", "return exitcodes.OK", "unit/supervise"),
    Break("launcher/decide/job/limits.py", "if at - since < limit or", "if at - since > limit or", "unit/supervise"),
    Break("launcher/decide/job/restarts.py", 'return "" if follows_another(failure) else failure.host', "return failure.host", "unit/supervise"),
    Break("launcher/decide/job/restarts.py", "if reached > self.best_step:", "if reached >= self.best_step:", "unit/supervise"),
    # leases, and nodes that are lost
    Break("launcher/decide/job/node_loss.py", "no_start_before(renewed_at + state.policy.lease)", "no_start_before(renewed_at)", "unit/supervise"),
    Break("launcher/decide/job/node_loss.py", "if len(near) >= len(far)", "if len(near) <= len(far)", "unit/supervise"),
    Break("launcher/decide/job/restarts.py", "max(self.term, after_term) + 1", "self.term + 1", "unit/supervise"),
    Break("launcher/job/link.py", "self._runs_from = self._sent.popleft()", "self._runs_from = self._sent.popleft()[0], self._clock.now()", "unit/coordinator"),
    Break("launcher/job/remote_link.py", "if isinstance(message, Generation) and self._lease.is_over:", "if False:", "unit/coordinator"),
    # the channel between nodes
    Break("reach/channel/handshake.py", "if not hmac.compare_digest(proofs.of(_CLIENT), answer.proof):", "if False:", "unit/control"),
    Break("reach/channel/handshake.py", "self._frames_received += 1", "self._frames_received += 0", "unit/control"),
    Break("reach/channel/handshake.py", "signing.update(number.to_bytes(8))", "signing.update(bytes(8))", "unit/control"),
    Break("system/loop/stream.py", "if length > self.limit:", "if False:", "unit/loop unit/control"),
    # output and what is kept
    Break("system/console/lines.py", "return whole if len(self._partial_line) <= MAX_LINE else", "return whole if True else", "unit/output"),
    Break("system/console/streams.py", 'if env.get("NO_COLOR"):', "if False:", "unit/output unit/report"),
    Break("record/old_runs.py", "if os.path.islink(folder) or not", "if not", "unit/runlog"),
    Break("record/old_runs.py", "return not run.failed_or_took_long, -run.written", "return run.failed_or_took_long, -run.written", "unit/runlog"),
    # processes: these need jobs
    Break("system/process/tree.py", "below += reversed(children(child))", "below += ()", "process/test_tree.py"),
    Break("system/process/child.py", "if signum != signal.SIGKILL:", "if signum == signal.SIGKILL:", "process/test_signals.py process/test_paused.py"),
    Break("system/process/files.py", "if not stat.S_ISREG(os.fstat(fd).st_mode):", "if False:", "unit/process"),
    Break("worker/error_file.py", "if isinstance(error, KeyboardInterrupt):", "if False:", "process/test_bootstrap_errors.py"),
)  # fmt: skip


def is_caught(one: Break) -> bool:
    """Make the break in a copy of the checkout, and return whether its tests fail there."""
    with tempfile.TemporaryDirectory(prefix="ddplaunch-breaks-") as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        file = Path(folder) / "ddplaunch" / one.file
        text = file.read_text(encoding="utf-8")
        if text.count(one.right) != 1:
            raise SystemExit(f"error: {one.file} has {text.count(one.right)} times: {one.right}")
        file.write_text(text.replace(one.right, one.wrong), encoding="utf-8")
        tests = [f"tests/{word}" if "/" in word else word for word in one.tests.split()]
        argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        env = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"error: pytest has ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.returncode == 1


def main(numbers: list[str]) -> int:
    """Make the breaks of these numbers, or all, and return 1 if one of them is not caught."""
    missed = 0
    for number, one in enumerate(BREAKS, 1):
        if numbers and str(number) not in numbers:
            continue
        caught = is_caught(one)
        missed += not caught
        print(f"{number:2} {'caught' if caught else 'MISSED'}  {one.file}: {one.wrong}", flush=True)
    print(f"{missed} not caught" if missed else "all caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
