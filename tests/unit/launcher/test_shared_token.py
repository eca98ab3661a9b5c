"""The secret that agents of one user share by a file: all get the same, nobody else gets it, and without doubt there is none."""

import os
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddplaunch.launcher.start import shared_token
from ddplaunch.launcher.start.shared_token import file_system

MOUNTS = r"""
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:26 / /home rw - nfs4 nas:/home rw,addr=10.0.0.9
31 30 0:27 / /home/ann/scratch rw shared:9 master:1 - lustre mgs:/s rw
32 22 0:28 / /with\040blank rw - nfs nas:/b rw
33 22 0:29 / /over rw - nfs nas:/o rw
34 22 0:30 / /over rw - tmpfs tmpfs rw
""".strip().splitlines()


def find(tmp_path: Path, identity: str = "slurm 84.0") -> str | None:
    return shared_token.find(str(tmp_path), identity, on_one_host=True)


def file_of(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "ddplaunch" / "tokens").iterdir()
    return found


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home", "nfs4"),
        ("/home/ann/.local", "nfs4"),
        ("/homeless", "ext4"),
        ("/home/ann/scratch/x", "lustre"),
        ("/with blank/x", "nfs"),
        ("/over/x", "tmpfs"),
    ],
)
def test_the_file_system_of_a_folder_is_that_of_the_nearest_and_last_mount(path: str, kind: str) -> None:
    assert file_system(path, MOUNTS) == kind


def test_however_many_agents_start_at_a_time_all_get_one_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(lambda _: find(tmp_path), range(64)))
    assert len(found) == 1
    assert len(found.pop() or "") == 64
    assert len(list((tmp_path / "ddplaunch" / "tokens").iterdir())) == 1


def test_another_job_has_another_secret_and_a_name_is_no_path(tmp_path: Path) -> None:
    assert find(tmp_path) != find(tmp_path, "slurm 84.1")
    assert find(tmp_path, "mpi ../../../x/\0\n" + "y" * 300) is not None
    assert {path.name[:24] for path in (tmp_path / "ddplaunch" / "tokens").iterdir()} == {
        "slurm_84.0",
        "slurm_84.1",
        "mpi_.._.._.._x___yyyyyyy",
    }


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    find(tmp_path)
    assert os.umask(before) == 0
    assert stat.S_IMODE((tmp_path / "ddplaunch").stat().st_mode) == 0o755
    assert stat.S_IMODE(file_of(tmp_path).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "ddplaunch" / "tokens").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.chmod(0o640),
        lambda file: file.parent.chmod(0o777),
        lambda file: file.write_text("short"),
        lambda file: file.write_bytes(b"\xff" * 64),
        lambda file: file.rename(file.parent / "else") and file.symlink_to("else"),
        lambda file: (file.unlink(), subprocess.run(["mkfifo", "-m", "600", file], check=True)),
        lambda file: file.unlink() or file.mkdir(),
        lambda file: file.unlink() or file.symlink_to("/nowhere"),
    ],
    ids=["mode", "mode of the folder", "size", "no text", "link", "pipe", "folder", "broken link"],
)
def test_a_file_that_another_may_have_written_or_read_is_no_secret(tmp_path: Path, damage) -> None:
    find(tmp_path)
    damage(file_of(tmp_path))
    assert find(tmp_path) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_file_of_another_user_is_no_secret(tmp_path: Path) -> None:
    find(tmp_path)
    os.chown(file_of(tmp_path), 65534, -1)
    assert find(tmp_path) is None


def test_a_home_that_may_be_this_hosts_own_holds_no_secret_for_others(tmp_path: Path) -> None:
    assert shared_token.find(str(tmp_path), "slurm 84.0", on_one_host=False) is None
    assert not list((tmp_path / "ddplaunch" / "tokens").iterdir())


def test_where_nothing_can_be_written_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "ddplaunch").write_text("")
    assert find(tmp_path) is None


def test_what_old_jobs_have_left_is_removed_and_the_own_is_used_however_old(tmp_path: Path) -> None:
    first = find(tmp_path, "slurm 1.0")
    os.utime(file_of(tmp_path), (0, 0))
    assert find(tmp_path, "slurm 1.0") == first
    find(tmp_path, "slurm 2.0")
    assert file_of(tmp_path).name == "slurm_2.0"


def test_a_node_that_joins_its_job_again_after_weeks_gets_the_same(tmp_path: Path) -> None:
    first = find(tmp_path, "slurm 1.0")
    began = time.time() - 60 * 24 * 3600
    os.utime(file_of(tmp_path), (began, began))
    find(tmp_path, "slurm 2.0")
    assert find(tmp_path, "slurm 1.0") == first
