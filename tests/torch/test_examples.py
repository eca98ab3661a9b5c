"""Every example says what it takes, has a page that leads to it, and its functions find what is wrong.

They are called in the process of the tests: torch, which takes seconds to import, is best imported there by one file.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.torch.example import EXAMPLES, module, needs_torch_and_digits

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
DOCS = EXAMPLES.parent / "docs"

each_example = pytest.mark.parametrize("name", NAMES)


@needs_torch_and_digits
@each_example
def test_an_example_says_what_it_takes_and_its_page_says_nothing_else(name, monkeypatch, capsys):
    example = module(f"{name}.py")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        example.main()
    said = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert said.startswith(f"usage: {name}.py")
    page = (DOCS / "examples" / f"{name}.md").read_text(encoding="utf-8")
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    for command in re.findall(rf"^(?:\$ |    ).*examples/{name}\.py(.*)$", page + source, re.MULTILINE):
        for flag in re.findall(r" (--[\w-]+)", command):
            assert flag in said, f"{name}.py {command}"


@each_example
def test_the_page_of_an_example_leads_to_it_and_is_found(name: str) -> None:
    page = (DOCS / "examples" / f"{name}.md").read_text(encoding="utf-8")
    assert f"](../../examples/{name}.py)" in page
    assert f"](examples/{name}.md)" in (DOCS / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\$ ddplaunch .*examples/{name}\.py", page, re.MULTILINE), "what to type"


# --- collectives.py


@needs_torch_and_digits
def test_a_wrong_result_is_found() -> None:
    example = module("collectives.py")
    example.join()
    try:
        mine = example.mine("cpu")
        example.check("reduce", example.Outcome(None, mine, [0]))
        example.check("reduce", example.Outcome(None, mine, None))
        with pytest.raises(RuntimeError, match=r"reduce: rank 0 has \[0\], and should have \[1\]"):
            example.check("reduce", example.Outcome(None, mine, [1]))
    finally:
        example.dist.destroy_process_group()


# --- from_data_parallel.py


@needs_torch_and_digits
@pytest.mark.parametrize(
    ("off", "words"),
    [
        ("outputs", "the outputs of DDP are not those of DataParallel"),
        ("gradient", "the weighted gradient of DDP is not that of DataParallel"),
        ("neither", "the shares are unequal, and yet the mean of the means is right"),
    ],
)
def test_what_differs_is_an_error(off: str, words: str) -> None:
    import torch

    example = module("from_data_parallel.py")

    def step(**changed: Any) -> Any:
        return example.Step(
            **{"outputs": torch.zeros(3, 10), "loss": 2.3, "gradient": torch.ones(7, dtype=torch.float64), **changed}
        )

    other = {"outputs": torch.full((3, 10), 1e-9), "gradient": torch.full((7,), 1 + 1e-9, dtype=torch.float64)}
    weighted = step(**{off: other[off]}) if off in other else step()
    with pytest.raises(RuntimeError, match=words):
        example.compare(step(), step(), weighted, [2, 1])


# --- memory_and_accumulation.py


@needs_torch_and_digits
def test_a_batch_that_cannot_be_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    example = module("memory_and_accumulation.py")
    monkeypatch.setattr(sys, "argv", ["memory_and_accumulation.py", "--pieces", "5"])
    try:
        with pytest.raises(SystemExit, match="--batch-size 64 cannot be cut into 5 equal pieces for each worker"):
            example.main()
    finally:
        example.dist.destroy_process_group()


@needs_torch_and_digits
@pytest.mark.parametrize(
    ("every", "one", "words"),
    [
        ([100, 100], [100, 90], "a rank that does not load has held more than half"),
        ([100, 10], [100, 0], "the measurement is wrong"),
        ([100, 100], [0, 0], "the measurement is wrong"),
    ],
)
def test_a_peak_that_cannot_be_is_an_error(every: Sequence[float], one: Sequence[float], words: str) -> None:
    check_peaks = module("memory_and_accumulation.py").check_peaks
    check_peaks(100, [100, 100], [100, 2])
    check_peaks(100, [100], [100])
    with pytest.raises(RuntimeError, match=words):
        check_peaks(100, every, one)


# --- model_parallel.py


@needs_torch_and_digits
@pytest.mark.parametrize(
    ("env", "gpus", "devices"),
    [
        ({}, 0, ("cpu", "cpu")),
        ({"DDPLAUNCH_DEVICE": "cpu"}, 4, ("cpu", "cpu")),
        ({"DDPLAUNCH_DEVICE": "cuda:0", "LOCAL_RANK": "1"}, 2, ("cuda:0", "cuda:1")),
        ({"LOCAL_RANK": "0"}, 4, ("cuda:0", "cuda:1")),
        ({"LOCAL_RANK": "1"}, 4, ("cuda:2", "cuda:3")),
        ({}, 2, ("cuda:0", "cuda:1")),
    ],
)
def test_a_worker_takes_its_own_two_devices(env: dict[str, str], gpus: int, devices: tuple[str, str]) -> None:
    import torch

    assert module("model_parallel.py").own_devices(env, gpus) == tuple(map(torch.device, devices))


@needs_torch_and_digits
@pytest.mark.parametrize(
    ("env", "gpus", "words"),
    [
        ({"DDPLAUNCH_DEVICE": "cuda:1"}, 2, "cuda:1 of 2 GPUs are not two of this worker's own: ddplaunch --gpus-per"),
        ({"DDPLAUNCH_DEVICE": "cuda:0"}, 4, "cuda:0 of 4 GPUs are not two"),
        ({"LOCAL_RANK": "1"}, 3, "needs GPUs 2 and 3, but there are only 3"),
    ],
)
def test_devices_of_another_worker_are_not_taken(env: dict[str, str], gpus: int, words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        module("model_parallel.py").own_devices(env, gpus)


# --- parallel_sgd.py


@needs_torch_and_digits
def test_a_worker_counts_for_as_much_as_it_has_images() -> None:
    import torch

    example = module("parallel_sgd.py")
    parts = [(torch.zeros(3, 1, 8, 8), torch.zeros(3)), (torch.zeros(1, 1, 8, 8), torch.zeros(1))]
    averaged = example.average([torch.tensor([0.0, 4.0]), torch.tensor([4.0, 0.0])], parts)
    assert averaged.tolist() == [1.0, 3.0]


@needs_torch_and_digits
def test_training_leaves_the_weights_that_it_started_from_as_they_were() -> None:
    import torch

    example = module("parallel_sgd.py")
    network = example.make_network()
    start = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
    kept = start.clone()
    parts, _ = example.load_data(40)
    trained = example.train_alone(network, start, parts[0], epochs=1, seed=0)
    assert torch.equal(start, kept)
    assert not torch.equal(trained, kept)


# --- train_ddp.py


@needs_torch_and_digits
def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    example = module("train_ddp.py")
    network = example.make_network()
    optimizer = network  # it has a state too, and imports nothing
    path = tmp_path / "digits.pt"
    example.save(path, 7, network, optimizer)

    with pytest.raises(Exception, match="<lambda>"):  # of a pickle, in the words of its version
        example.save(path, lambda: "no pickle takes this", network, optimizer)

    assert example.restore(path, network, optimizer) == 7
