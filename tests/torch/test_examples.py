"""Every example says what it takes, has a page that leads to it, and its functions do what they say.

They are called in the process of the tests: torch, which takes seconds to import, is best imported there by one file.
"""

import re
import sys

import pytest

from tests.torch.example import EXAMPLES, module, needs_torch_and_digits

NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
DOCS = EXAMPLES.parent / "docs"
# the page of an example that has none of its own name
PAGES = {
    **dict.fromkeys(["hogwild", "parallel_sgd", "queues", "shared_regression"], "multiprocessing"),
    "model_parallel": "memory_and_accumulation",
    "elastic_checkpoint": "checkpoints",
    "from_data_parallel": "train_ddp",
}


def page_of(name: str) -> str:
    """Return the page about an example, as a link in docs/ has it."""
    return f"examples/{PAGES.get(name, name)}.md"


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
    page = (DOCS / page_of(name)).read_text(encoding="utf-8")
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    for command in re.findall(rf"^(?:\$ |    ).*examples/{name}\.py(.*)$", page + source, re.MULTILINE):
        for flag in re.findall(r" (--[\w-]+)", command):
            assert flag in said, f"{name}.py {command}"


@each_example
def test_the_page_of_an_example_leads_to_it_and_is_found(name: str) -> None:
    page = (DOCS / page_of(name)).read_text(encoding="utf-8")
    assert f"](../../examples/{name}.py)" in page
    assert f"]({page_of(name)}" in (DOCS / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^\$ ddplaunch .*examples/{name}\.py", page, re.MULTILINE), "what to type"


# --- from_data_parallel.py


@needs_torch_and_digits
def test_checkpoints_travel_between_the_wrappers_as_the_page_says() -> None:
    from torch import nn
    from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

    module_, wrapped = nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2))
    state = wrapped.state_dict()
    assert list(state) == ["module.weight", "module.bias"]
    wrapped.module.load_state_dict(module_.state_dict())
    consume_prefix_in_state_dict_if_present(state, "module.")
    module_.load_state_dict(state)


# --- memory_and_accumulation.py


@needs_torch_and_digits
def test_a_batch_that_cannot_be_cut_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    example = module("memory_and_accumulation.py")
    monkeypatch.setattr(sys, "argv", ["memory_and_accumulation.py", "--pieces", "5"])
    with (
        pytest.raises(SystemExit, match="--batch-size 64 is not a multiple of 1 x 5 pieces"),
        example.ddplaunch.init_process_group(),
    ):
        example.main()
    example.dist.destroy_process_group()


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

    assert module("model_parallel.py").two_devices(env, gpus) == tuple(map(torch.device, devices))


@needs_torch_and_digits
@pytest.mark.parametrize(
    ("env", "gpus", "words"),
    [
        ({"DDPLAUNCH_DEVICE": "cuda:1"}, 2, "this worker has cuda:1 of 2 GPUs: ddplaunch --gpus-per-worker 2"),
        ({"DDPLAUNCH_DEVICE": "cuda:0"}, 4, "this worker has cuda:0 of 4 GPUs"),
        ({"LOCAL_RANK": "1"}, 3, "needs GPUs 2 and 3, but there are only 3"),
    ],
)
def test_devices_of_another_worker_are_not_taken(env: dict[str, str], gpus: int, words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        module("model_parallel.py").two_devices(env, gpus)


# --- parallel_sgd.py


@needs_torch_and_digits
def test_a_worker_counts_for_as_much_as_it_has_images() -> None:
    import torch

    averaged = module("parallel_sgd.py").average([torch.tensor([0.0, 4.0]), torch.tensor([4.0, 0.0])], [3, 1])
    assert averaged.tolist() == [1.0, 3.0]


@needs_torch_and_digits
def test_training_leaves_the_weights_that_it_started_from_as_they_were() -> None:
    import torch

    example = module("parallel_sgd.py")
    model = example.make_model()
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    kept = start.clone()
    parts, _ = example.load_data(40)
    trained = example.train_alone(model, start, parts[0], epochs=1, seed=0)
    assert torch.equal(start, kept)
    assert not torch.equal(trained, kept)
