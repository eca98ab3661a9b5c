"""The example for Slurm, without Slurm: interrupted in whichever step, it ends with the weights of a run that never was."""

import random
import re
import signal

from tests.conftest import Job, until
from tests.torch.example import EXAMPLES, LONG, QUICK, launched, needs_torch_and_digits, weights

pytestmark = needs_torch_and_digits

EXAMPLE = EXAMPLES / "slurm" / "train.py"
SHORT = ("--epochs", "4", "--target", "80")
END = re.compile(r"accuracy ([0-9.]+)%, weights equal on all 2 ranks")


def test_interrupted_and_started_again_it_ends_with_the_same_weights_bit_for_bit(job: Job) -> None:
    """With two workers: of more, DDP adds the gradients in another order after its first step, which a new start repeats."""
    words = ("--nproc-per-node", 2, EXAMPLE, *SHORT, "--checkpoint")
    undisturbed = launched(job, *words, "whole.pt")
    assert undisturbed.status == 0, undisturbed.err

    interrupt(job, after=random.choice((1, 2)))
    result = launched(job, *words, "digits.pt")
    assert result.status == 0, result.err
    assert "goes on before step" in result.out

    assert weights(job.home / "whole.pt") == weights(job.home / "digits.pt")
    assert END.findall(undisturbed.out) == END.findall(result.out) != []
    assert not list(job.home.glob("*.tmp"))


def interrupt(job: Job, after: int) -> None:
    """Start the training, and announce its end in whichever step after this epoch."""
    printed = job.home / "printed"
    words = ("--nproc-per-node", 2, EXAMPLE, "--checkpoint", "digits.pt", *SHORT)
    with printed.open("wb") as out:
        process = job.start(*words, env=QUICK, stdout=out, stderr=out)
        until(lambda: f"epoch {after:2}: accuracy" in printed.read_text(), f"the end of epoch {after}", LONG)
        process.send_signal(signal.SIGUSR1)
        result = job.wait(LONG)
    text = printed.read_text()
    assert result.status == 0, text
    assert len(re.findall(r"^\[0\] saved before step \d+ of epoch \d, to digits.pt$", text, re.MULTILINE)) == 1, text
    assert not END.search(text)
