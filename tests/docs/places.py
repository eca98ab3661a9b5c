"""Where a command of a page is typed: the machine, the files, the programs that the page takes for granted.

What a page itself shows as a file, with `title="NAME"` at its block, is that file. A program of which it shows only what it
prints is in programs/, below the name of the page. All others are stubs, which say their rank and end.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from ddplaunch.cli.command import VERBS
from tests.docs.pages import Block, Command, blocks, name_of
from tests.fake_nvml import made_up
from tests.unit.environments import captured

LOOK_INTO_RUNS = {verb for verb, (module, _) in VERBS.items() if module == "running"}

PROGRAMS = Path(__file__).parent / "programs"
STUB = "import os\n\nprint(f\"rank {os.environ['RANK']}\")\n"

# how many GPUs there are where a page shows what comes out: none but here
GPUS = {
    "guides/devices.md": "A100 A100 A100 A100",
    "guides/devices.md: ddplaunch plan train.py": "A100/2 A100",  # with MIG on
}
NODE = " ".join(["H200"] * 4)  # where it shows a command alone
# whoever starts ours, and what its processes have in their environment
STARTERS: list[tuple[str, Callable[[], Mapping[str, str]]]] = [
    (r"srun .*--ntasks-per-node 4", lambda: captured("slurm-rank-0")),
    (r"srun ", lambda: captured("slurm-node-0")),
    (r"mpirun -N 1", lambda: captured("openmpi4-node-0")),
    (r"mpirun -np 12", lambda: captured("openmpi4-rank-0")),
    (r"mpiexec ", dict),  # MPICH's, outside of a batch job
]
# Slurm says that the job runs, and that its node, whichever that is, is this host
SCONTROL = f"""#!/bin/sh
case "$*" in
    "show job"*) echo "JobId=1 JobName=train UserId=me({os.getuid()}) JobState=RUNNING Reason=None" ;;
    "show node"*) echo "NodeName=node1 NodeHostName={os.uname().nodename} State=ALLOCATED" ;;
esac
"""
# words that call for other hosts or tools; a terminal; a process that outlives the test; a wait
_ELSEWHERE = {"--hosts", "--hostfile", "--nnodes", "--wrap"}
_TERMINAL = {"--debug", "--debug-on-error", "--debugpy"}
_KEPT = {"--keep-warm"}
_SUBMIT = {"--follow", "--wait", "--parsable"}


def pod(block: Block, index: int) -> dict[str, str]:
    """The variables of a pod of the job in a manifest, and its host name as HOSTNAME, as Kubernetes would set them.

    An Indexed Job numbers its pods and names their hosts by that; a JobSet has such jobs (kubernetes.io/docs/tasks/job,
    jobset.sigs.k8s.io/docs/concepts).
    """
    job = next(part for part in yaml.safe_load_all(block.text) if part["kind"] in ("Job", "JobSet"))
    name = job["metadata"]["name"]
    if job["kind"] == "JobSet":
        [replicated] = job["spec"]["replicatedJobs"]
        job, name = replicated["template"], f"{name}-{replicated['name']}-0"
    variables = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": f"{name}-x7k2p"}
    if job["spec"].get("completionMode") == "Indexed":
        variables |= {"JOB_COMPLETION_INDEX": f"{index}", "HOSTNAME": f"{name}-{index}"}
    [container] = job["spec"]["template"]["spec"]["containers"]
    return variables | {one["name"]: one.get("value", "a-secret-of-the-cluster") for one in container.get("env", ())}


class Place:
    """A folder with all that one command needs."""

    def __init__(self, home: Path, command: Command, folder: Path | None = None) -> None:
        self.home = home  # of the user; what ddplaunch leaves is in .local
        self.folder = folder or home / "project"
        self.command = command
        self.page = name_of(command.block.page)
        self.own_program = False  # whether what the page shows is what this program prints
        self._lay_out()

    @property
    def words(self) -> list[str]:
        """What to type behind `ddplaunch`: the words of the page, or those that show what they would do."""
        if self.command.words[0] in LOOK_INTO_RUNS:  # their job runs elsewhere; tests/process/test_run_verbs.py has one
            return [self.command.words[0], "--help"]
        words = [str(self.home / word[2:]) if word.startswith("~/") else word for word in self.command.words]
        if words[0] == "submit":
            return ["submit", "--print", *(word for word in words[1:] if word not in {"--print", *_SUBMIT})]
        return ["plan", *words] if self.is_planned else words

    @property
    def is_planned(self) -> bool:
        """Whether the plan stands for the run: it needs what is not here."""
        words = set(self.command.words)
        if words & (VERBS.keys() - {"run"}):
            return False
        if "--simulate" in words:
            return False
        return bool(self.command.before or self.around or words & (_ELSEWHERE | _TERMINAL | _KEPT))

    @property
    def is_compared(self) -> bool:
        """Whether what comes out must be what the page shows."""
        if not self.command.shown or self.is_planned:
            return False
        if self.command.words[0] == "submit":
            return self.command.is_wrong or "--print" in self.command.words
        return self.command.is_wrong or self.command.words[0] == "plan" or self.own_program

    @property
    def around(self) -> Mapping[str, str]:
        """The variables of the cluster that the page speaks of."""
        for starter, variables in STARTERS:
            if re.match(starter, self.command.before):
                return variables()
        block = self.command.block
        if block.language == "yaml":
            return pod(block, index=0)
        if "#BSUB" in block.text:
            return {"LSB_JOBID": "84", "LSB_MCPU_HOSTS": "gpu01 32 gpu02 32 gpu03 32"}
        if self.page == "recipes/mpi-pbs-lsf.md":
            return {"PBS_JOBID": "84", "PBS_NODENUM": "0", "PBS_NODEFILE": f"{self.folder}/hosts.txt"}
        if "#SBATCH" in block.text or self.page.startswith("recipes/slurm") or "in a Slurm job" in self.command.typed:
            return captured("slurm-batch")
        return {}

    def variables(self, library: Path) -> dict[str, str]:
        """The environment of the command, besides what every test has."""
        typed = f"{self.page}: {self.command.typed}"
        shown = self.command.shown is not None
        gpus = GPUS.get(typed, GPUS.get(self.page, "")) if shown else NODE
        machine = made_up.machine(library, gpus) if gpus else {"LD_LIBRARY_PATH": str(library), "FAKE_GPUS": ""}
        isolated = {"HOME": f"{self.home}", "PATH": f"{self.home}/bin", "TMPDIR": f"{self.home}/.local/tmp"}
        broken = {"IS_BROKEN": "1"} if "--chaos" in self.command.words else {}
        return {**machine, **self.around, **self.command.variables, **broken, **isolated}

    def _lay_out(self) -> None:
        for folder in (self.folder, self.home / ".local", self.home / "bin", self.home / "other/bin"):
            folder.mkdir(parents=True, exist_ok=True)
        if "SLURM_JOB_ID" in self.around:
            self._write("../bin/scontrol", SCONTROL).chmod(0o755)
        self._write("train.env", "NCCL_DEBUG=WARN\n")
        self._write("hosts.txt", "gpu01\ngpu02\ngpu03\n")
        self._write("../.ddplaunch-token", "0123456789abcdef\n").chmod(0o600)
        pythons = {word[2:] for word in self.command.words if word.startswith("~/") and word.endswith("/python")}
        for python in {"other/bin/python", *pythons}:
            self._write(f"../{python}", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n').chmod(0o755)
        for block in blocks(self.command.block.page):
            if block.title is not None:
                self._write(block.title, block.text)
        self._program()

    def _program(self) -> None:
        words = self.command.words
        if "-m" in words:
            self._write(words[words.index("-m") + 1].replace(".", "/") + ".py", STUB)
        if "./program" in words:
            self._write("program", "#!/bin/sh\necho rank $RANK\n").chmod(0o755)
        for name in (word for word in words if word.endswith(".py")):
            shows = PROGRAMS / self.page.removesuffix(".md") / name
            if self.command.shown and shows.exists():
                self._write(name, shows.read_text())
                self.own_program = True
            elif (self.folder / name).exists():
                self.own_program = True
            else:
                self._write(name, STUB)

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path
