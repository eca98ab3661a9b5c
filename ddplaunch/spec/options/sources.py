"""Collects the options in variables, configuration files and keywords. Parses no value, resolves no conflict.

A variable of Kubernetes' service links is no option, even if it has the name of one: for a Service `master` a pod has
MASTER_SERVICE_HOST, MASTER_SERVICE_PORT, MASTER_SERVICE_PORT_HTTP (a port's name), MASTER_PORT=tcp://10.1.2.3:29500,
MASTER_PORT_29500_TCP, MASTER_PORT_29500_TCP_ADDR and more (kubernetes.io, "Accessing the Service"). `docker run --link
CONTAINER:master` sets most of these, MASTER_NAME and MASTER_ENV_NAME.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ddplaunch.spec.job import Given, Source
from ddplaunch.spec.options import token
from ddplaunch.spec.options.table import BY_NAME, OPTIONS, Option
from ddplaunch.system.errors import LaunchError
from ddplaunch.system.process.files import ask_disk, exists_on_disk
from ddplaunch.system.words import did_you_mean, why_failed

_SOURCE_OF_FILE = {"pyproject.toml": Source.PYPROJECT, "ddplaunch.toml": Source.FILE}
_TABLE = "[tool.ddplaunch]"
_LARGEST_FILE = 1 << 20  # bytes of a file
_PREFIX = "DDPLAUNCH_"  # of our variables
_VARIABLES_WITHOUT_OPTION = frozenset({token.VARIABLE, token.RDZV_HOST, token.RDZV_PORT, token.TASKS_PER_NODE})


def from_variables(env: Mapping[str, str]) -> Iterator[Given]:
    """Take PET_*, DDPLAUNCH_* and torch's variables that have an option; an empty one, or a link, counts as not set."""
    for option in OPTIONS:
        for name, source in option.variables:
            text = env.get(name, "")
            if text.strip() and not is_link(name, text):
                text = text if option.verbatim else text.strip()
                yield Given(name=option.name, text=text, source=source, origin=name, form=f"{name}={{}}")


def unknown_variables(env: Mapping[str, str]) -> Iterator[str]:
    """Yield a note on each variable that looks like one of ours and is none; not in a worker, which has others of ours."""
    if "DDPLAUNCH_RUN_ID" in env:
        return
    of_options = {name for option in OPTIONS for name, _ in option.variables if name.startswith(_PREFIX)}
    known = of_options | _VARIABLES_WITHOUT_OPTION
    after_prefix = sorted(name.removeprefix(_PREFIX) for name in known)  # the prefix makes all alike
    for name in sorted(name for name in without_service_links(env) if name.startswith(_PREFIX) and name not in known):
        meant = did_you_mean(name.removeprefix(_PREFIX), after_prefix, cutoff=0.75)
        hint = f"; did you mean {_PREFIX}{meant}?" if meant else ""
        yield f"{name} has no effect: ddplaunch has no such variable{hint}"


def ignored_service_links(env: Mapping[str, str]) -> Iterator[str]:
    """Yield a note on each variable of a Service that has the name of one which is read as a port."""
    read_as_ports = ("MASTER_PORT", *(name for name, _ in BY_NAME["master_port"].variables))
    for name in read_as_ports:
        if is_link(name, env.get(name, "")):
            yield why_ignored(env, name)


def from_files(folder: str) -> tuple[list[Given], list[str]]:
    """Return the options in the nearest pyproject.toml with a [tool.ddplaunch] table, then those in the nearest ddplaunch.toml.

    Both are looked for in this folder and above it. Also return remarks on files that are ignored because another user could
    have left them, as in /tmp: an option may name the interpreter.

    Raises:
        LaunchError: a file of this user cannot be read, one holds what is not an option, or the disk hangs.
    """
    folders_upward = [folder]
    while (above := os.path.dirname(folders_upward[-1])) != folders_upward[-1]:
        folders_upward.append(above)
    what = f"the working directory, in which {' or '.join(_SOURCE_OF_FILE)} may lie,"
    if not exists_on_disk([os.path.join(place, file) for place in folders_upward for file in _SOURCE_OF_FILE], what):
        return [], []
    return ask_disk(partial(_from_files, folders_upward), folder, what, hint="`cd` to a folder on a disk that works")


def _from_files(folders_upward: Sequence[str]) -> tuple[list[Given], list[str]]:
    """Return the options in the files of these folders, each below the next, and remarks on files that are ignored."""
    given: list[Given] = []
    remarks: list[str] = []
    for file, source in _SOURCE_OF_FILE.items():
        for folder in folders_upward:
            path = os.path.join(folder, file)
            shown_path = file if folder == folders_upward[0] else path
            try:
                table = _table(path, source, shown_path=shown_path)
            except _IgnoredError as reason:
                remarks.append(f"{shown_path} is ignored: {reason}")
                continue
            if table is not None:  # of each file, the nearest counts alone
                given += _of_table(table, source, folder, shown_path=shown_path)
                break
    return given, remarks


class _IgnoredError(Exception):
    """Why a file is not for us, as it reads after its name."""


def _table(path: str, source: Source, *, shown_path: str) -> dict[str, Any] | None:
    """Return our part of the file, None if there is none; _IgnoredError if the file is not ours to read.

    Another user may have left the file, or a link to one, and may replace it while it is looked at.
    """
    try:
        entry = os.lstat(path)  # the link itself, where it is one
    except OSError:
        return None
    owner = entry.st_uid
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before it is opened, which has an effect on some devices
            raise _IgnoredError("it is not a regular file")
        # O_NONBLOCK: if it has become a pipe since, to open it waits for no writer
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY), "rb") as file:
            opened = os.fstat(file.fileno())
            owner = opened.st_uid
            content = file.read(_LARGEST_FILE + 1) if stat.S_ISREG(opened.st_mode) else b""
    except OSError as error:
        # such a file may hold nothing for us, or is not this user's to mend
        if source is Source.PYPROJECT or owner != os.geteuid():
            raise _IgnoredError(f"it cannot be read: {why_failed(error)}") from None
        raise LaunchError(f"cannot read {shown_path}: {why_failed(error)}") from None
    beginning = _TABLE.removesuffix("]").encode()  # of [tool.ddplaunch], or of [tool.ddplaunch.env]
    if source is Source.PYPROJECT and beginning not in content:
        return None  # it is for other tools, and may then be of any size, owner and form
    if others := {entry.st_uid, owner} - {0, os.geteuid()}:
        raise _IgnoredError(f"it belongs to another user ({others.pop()})")
    if len(content) > _LARGEST_FILE:
        raise _IgnoredError(f"it is larger than {_LARGEST_FILE >> 20} MiB")
    import tomllib  # most jobs have no such file

    try:
        data: Any = tomllib.loads(content.decode())
    except ValueError as error:
        raise LaunchError(f"{shown_path} is not valid TOML: {error}") from None
    if source is Source.PYPROJECT:
        tools = data.get("tool")
        data = tools.get("ddplaunch") if isinstance(tools, dict) else None
    if data is not None and not isinstance(data, dict):
        raise LaunchError(f"{_TABLE} in {shown_path} is not a table")
    return data


def _of_table(table: dict[str, Any], source: Source, folder: str, *, shown_path: str) -> Iterator[Given]:
    """Yield the options in a table of TOML; paths in the table are relative to its `folder`."""
    keys: dict[str, str] = {}  # by the name of the option: as the table writes it
    for key, value in table.items():
        option = BY_NAME.get(key.replace("-", "_"))
        if option is None:
            meant = did_you_mean(key.replace("_", "-"), (known.key for known in OPTIONS))
            raise LaunchError(
                f"{key} in {shown_path} is not an option",
                hint=f"did you mean `{meant}`?" if meant else "ddplaunch --help",
            )
        if option.name in keys:
            raise LaunchError(
                f"{keys[option.name]} and {key} in {shown_path} are the same option", hint="leave one out"
            )
        keys[option.name] = key
        quote = '"' if isinstance(value, (str, dict, list)) else ""
        form = f"{option.key} = {quote}{{}}{quote}"  # how errors show it, {} for the value
        for text in _texts_of_toml(option, value, shown_path):
            is_name_on_path = option.path_kind == "command" and "/" not in text
            is_path = text and option.path_kind and not is_name_on_path
            text_in_job = os.path.normpath(os.path.join(folder, text)) if is_path else text
            yield Given(name=option.name, text=text_in_job, source=source, origin=shown_path, form=form)


def _texts_of_toml(option: Option, value: object, shown_path: str) -> Iterable[str]:
    """Return a value in a file as words of a command line; LaunchError if the option takes no value of this type."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    has_other_types = any(isinstance(item, bool) or not isinstance(item, (str, int, float)) for item in inner)
    texts = _texts(option, value)
    if texts is None or has_other_types:
        kind = _TOML_TYPES.get(type(value), "a date or a time")
        raise LaunchError(f"{option.key} in {shown_path}: expected {_types(option, _IN_TOML)}, not {kind}")
    return map(str.lower, texts) if isinstance(value, bool) else texts  # "true", as TOML writes it


def from_keywords(keywords: Mapping[str, object], *, call: str) -> Iterator[Given]:
    """Read keyword arguments; None means that the option is not given. `call` is the name of the function.

    Raises:
        TypeError: there is no such option, or a value of this type is not one of the option's.
    """
    for name, value in keywords.items():
        option = BY_NAME.get(name)
        if option is None:
            meant = did_you_mean(name, BY_NAME)
            raise TypeError(
                f"{call} got an unexpected keyword argument {name!r}" + (f"; did you mean {meant!r}?" if meant else "")
            )
        if value is not None:
            if (texts := _texts(option, value)) is None:
                kind = type(value).__name__
                raise TypeError(f"{call}: {name}={value!r}: expected {_types(option, _IN_PYTHON)}, not {kind}")
            for text in texts:
                yield Given(name=name, text=text, source=Source.CALL, origin=call, form=f"{name}={{}}")


# --- values of Python and TOML


class _TypeNames(NamedTuple):
    """What types of values are called, in a language."""

    true: str
    false: str
    variables: str  # those of the workers
    several: str


_IN_PYTHON = _TypeNames("True", "False", "a dict of strings", "a list")
_IN_TOML = _TypeNames("true", "false", "a table or an array of strings", "an array")
_TOML_TYPES = {
    bool: "a boolean",
    str: "a string",
    int: "a number",
    float: "a number",
    dict: "a table",
    list: "an array",
}


def _texts(option: Option, value: object) -> list[str] | None:
    """Return a value of TOML or Python as words of a command line; None if the option takes no value of this type."""
    match value:
        case bool() if option.is_flag:
            return [str(value)]
        case bool() if option.implied_value is not None:
            return [option.implied_value] if value else []  # true stands for the value that the flag alone implies
        case str() | int() if not option.is_flag and not isinstance(value, bool):
            return [str(value)]
        case float() if not option.is_flag:
            return [_text_of_number(value)]
        case os.PathLike() if option.path_kind:
            return [os.fsdecode(value)]
        case Mapping() if option.name == "env":
            return [f"{name}={content}" for name, content in value.items()]
        case list() | tuple() if option.repeatable:
            return [str(item) for item in value]
        case list() | tuple() | set() | frozenset() if option.takes_list:
            return [",".join(map(str, value))]
    return None


def _text_of_number(value: float) -> str:
    """Return a number with up to three decimals, as times have; one that would become 0 as Python writes it: 1e-05."""
    rounded = round(value, 3)
    vanishes = value and not rounded
    return repr(value) if vanishes else f"{rounded:.3f}".rstrip("0").rstrip(".")


def _types(option: Option, names: _TypeNames) -> str:
    """Return which values an option takes."""
    if option.is_flag:
        return f"{names.true} or {names.false}"
    if option.name == "env":
        return names.variables
    if option.implied_value is not None:  # the value that the flag alone implies
        return f"{names.true}, a string or a number"
    has_several = option.takes_list or option.repeatable
    return f"a string, a number or {names.several} of them" if has_several else "a string or a number"


_URL = re.compile(r"(?:tcp|udp|sctp)://[^\s/]+:\d+")
_SUFFIX = r"_SERVICE_HOST|_SERVICE_PORT(_.+)?|_PORT(_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO|START|END))?)?|_NAME|_ENV_.+"
_PORT = "_PORT"


def is_link(name: str, value: str) -> bool:
    """Return whether a variable with the name of a port holds the address of a Service: MASTER_PORT=tcp://10.1.2.3:29500."""
    return name.endswith(_PORT) and _URL.fullmatch(value) is not None


def without_service_links(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables but for all those of Services and of linked containers."""
    linked = [name.removesuffix(_PORT) for name, value in env.items() if is_link(name, value)]
    if not linked:
        return dict(env)
    of_link = re.compile(f"(?:{'|'.join(map(re.escape, linked))})(?:{_SUFFIX})")
    return {name: value for name, value in env.items() if not of_link.fullmatch(name)}


def why_ignored(env: Mapping[str, str], name: str) -> str:
    """Return the sentence that says who has set this link, as the user finds it: by the name of the Service or container."""
    stem = name.removesuffix(_PORT)
    service = stem.lower().replace("_", "-")  # whose name has no underscore and no capital
    if "KUBERNETES_SERVICE_HOST" in env:
        maker = (
            f"Kubernetes sets it in each pod for the Service {service} (unless the pod has `enableServiceLinks: false`)"
        )
    else:
        maker = f"Docker sets it for a linked container {service}"
    return f"{name}={env[name]} is ignored: {maker}"
