"""A job that one ddplaunch hands to another: the options as they were given, the program, and the variables of its workers. Pure.

Three ways carry an order: a frame to a host over ssh (`reach/order.py` adds the host's part in the job), variables of a step of
Slurm, and the line to the command of a call of `launch()`. Texts are bytes, for they need not be UTF-8. A host is not to load
what resolves options before it has sent its greeting, so functions import that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ddplaunch.system.fields import Malformed, decoder

if TYPE_CHECKING:
    from ddplaunch.spec.job import Given, JobSpec

_LONGEST_VARIABLE = 100_000  # bytes of a variable; Linux takes 128 KiB (MAX_ARG_STRLEN)


class Order(Struct, frozen=True):
    """All that another ddplaunch needs to resolve the options as this one did."""

    given: tuple[tuple[bytes, bytes, bytes, bytes, bytes], ...]  # options, each as the fields of `Given`
    program: tuple[bytes, ...]  # and its arguments
    # variables: the name, the value, the file that it is from or b""
    for_workers: tuple[tuple[bytes, bytes, bytes], ...] = ()

    @classmethod
    def of(cls, given: Iterable[Given], spec: JobSpec) -> Order:
        """Return the order to run the program of a job with these of its options."""
        secrets = spec.origins_of_secrets
        return cls(
            given=tuple(_encoded(one.fields()) for one in given),
            program=_encoded((spec.program.target, *spec.program.args)),
            for_workers=tuple(_encoded((name, value, secrets.get(name, ""))) for name, value in spec.env),
        )

    def spec(self) -> JobSpec:
        """Return the job. Raises LaunchError: the job cannot run here."""
        from ddplaunch.spec.job import Given
        from ddplaunch.spec.options.resolve import received

        given = (Given.from_fields(map(os.fsdecode, fields)) for fields in self.given)
        variables = (
            (os.fsdecode(name), os.fsdecode(value), os.fsdecode(from_file))
            for name, value, from_file in self.for_workers
        )
        return received(given, tuple(map(os.fsdecode, self.program)), variables)

    def variables(self) -> dict[str, str]:
        """Return the variables that hold this order: ps shows arguments to everybody, and srun takes some for its own.

        They are compressed, for all arguments and variables of a program together have a limit (execve(2)): what just fitted into
        our own command line is to fit here.
        """
        import zlib  # a step of Slurm alone needs them
        from base64 import b64encode

        from ddplaunch.spec.options.token import ORDER

        text = b64encode(zlib.compress(encode(self), level=1)).decode()
        starts = range(0, len(text), _LONGEST_VARIABLE)
        return {f"{ORDER}{index}": text[at : at + _LONGEST_VARIABLE] for index, at in enumerate(starts)}


encode = msgspec.json.Encoder().encode
decode: Callable[[bytes], Order] = decoder(Order)


def from_variables(env: Mapping[str, str]) -> Order:
    """Return the order in the variables of a step. Raises Malformed: there is none."""
    import zlib
    from base64 import b64decode

    from ddplaunch.spec.options.token import ORDER

    names = takewhile(env.__contains__, (f"{ORDER}{index}" for index in count()))  # from 0 on, without a gap
    try:
        return decode(zlib.decompress(b64decode("".join(env[name] for name in names))))
    except (ValueError, zlib.error) as error:
        raise Malformed(str(error)) from None


def _encoded(texts: Iterable[str]) -> Any:  # a tuple of as many
    return tuple(map(os.fsencode, texts))
