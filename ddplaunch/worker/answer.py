"""The answer of a worker to the caller of its function: the result, or the exception, by value. Sends nothing itself."""

import io
import pickle
import sys
import traceback
from types import MemberDescriptorType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TRACEBACK_LIMIT = 64 * 1024  # characters
ERROR_LIMIT = 4 << 20  # bytes of a pickled exception; one that is larger goes as text


def dump(result: object, limit: int) -> memoryview:
    """Pickle the result by value."""
    buffer = Limited(limit)
    try:
        pickler(buffer).dump(result)
    except Limited.Full:
        raise ValueError(
            f"the result is larger than max_result_bytes={limit}: write it to a file and return its name"
        ) from None
    except OnDevice as error:
        raise TypeError(str(error)) from None
    except Exception as error:
        raise TypeError(f"the result cannot be sent to the caller: {error}{advice(result)}") from error
    return buffer.getbuffer()


class Limited(io.BytesIO):
    """A file in memory with a maximum size."""

    class Full(Exception):
        """There is no more room."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def write(self, data: "Any") -> int:
        """Write, if there is room."""
        if self.tell() + memoryview(data).nbytes > self.limit:
            raise Limited.Full
        return super().write(data)


class OnDevice(Exception):
    """A tensor would have to be on a device of the caller's."""


def pickler(buffer: io.BytesIO) -> "pickle.Pickler":
    """Return a pickler that refuses tensors which are not on the CPU."""
    base: Any = pickle.Pickler
    if "cloudpickle" in sys.modules:  # the function was sent by it, and may return what it defines
        base = sys.modules["cloudpickle"].Pickler

    class Pickler(base):  # type: ignore[misc]  # the base is known only at run time
        def reducer_override(self, value: object) -> object:
            torch = sys.modules.get("torch")
            tensor = getattr(torch, "Tensor", ())
            if isinstance(value, tensor):
                device: Any = value.device
                if device.type != "cpu":
                    raise OnDevice(f"the result holds a tensor on {device}: return tensor.cpu()")
            return super().reducer_override(value) if hasattr(base, "reducer_override") else NotImplemented

    return Pickler(buffer, pickle.HIGHEST_PROTOCOL)


def advice(result: object) -> str:
    """Return advice on a result of a kind that is often returned by mistake."""
    kind = type(result).__name__
    if kind == "generator":
        return "; return list(...) of it"
    return "; run it with asyncio.run()" if kind == "coroutine" else ""


def describe(error: BaseException) -> "dict[str, Any]":
    """Return the exception as it is sent to the caller."""
    name = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__", "__mp_main__"):
        name = f"{type(error).__module__}.{name}"
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - it is the program's code
        message = "<exception str() failed>"
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"type": name, "message": message[:TRACEBACK_LIMIT], "traceback": shorten(text), "parts": parts(error)}


def parts(error: BaseException) -> "bytes | None":
    """Pickle type, args and attributes of the exception, if that is possible; its traceback and cause go as text.

    Pickled as a whole, it could not be unpickled if its __init__ takes more than what ends up in args.
    """
    attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
    for kind in type(error).__mro__:
        if kind is not BaseException:  # attributes outside the instance's dictionary, such as the errno of an OSError
            for name, kept in vars(kind).items():
                # an OSError with a file that is None would show it
                if isinstance(kept, MemberDescriptorType) and getattr(error, name, None) is not None:
                    attributes[name] = getattr(error, name)
    try:
        buffer = Limited(ERROR_LIMIT)
        pickler(buffer).dump((type(error), error.args, attributes))
        data = buffer.getvalue()
        pickle.loads(data)
        return data
    except Exception:  # noqa: BLE001 - as above
        return None


def shorten(text: str) -> str:
    """Leave out the middle of a very long text."""
    if len(text) <= TRACEBACK_LIMIT:
        return text
    half = TRACEBACK_LIMIT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
