"""The program of workers in a job of `ddplaunch.launch()`: runs a function of the caller, the process that called launch().

The caller listens at an abstract Unix address, the first line of DDPLAUNCH_CALL. When both have proved that they know the
secret, it sends one message: the preparation that multiprocessing's "spawn" sends to a child, and the pickled function with
its arguments, with descriptors of shared memory. The answer is the result or the exception, by value. Standard library only.
What the function raises goes to the caller and into the error file; it is not printed here, since the caller raises it.
"""

import faulthandler
import hmac
import io
import os
import pickle
import socket
import struct
import sys
from types import MemberDescriptorType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType, TracebackType
    from typing import Any

# the same in tools/functions/connection.py
NONCE_SIZE = PROOF_SIZE = 32  # bytes: random ones, and an HMAC-SHA256 of both sides' ones
HELLO = struct.Struct("!32sii32s")  # nonce, rank, world size, proof
CALL = struct.Struct("!QQI")  # sizes of the preparation and of the function, number of descriptors
ANSWER = struct.Struct("!cQ")  # kind, size
RESULT, ERROR = b"r", b"e"
DESCRIPTORS_AT_ONCE = 200  # in one message; Linux takes 253

ERROR_LIMIT = 4 << 20  # bytes of a pickled exception; a larger one goes as text

RANK = int(os.environ["RANK"])


class CallerConnection:
    """The connection of this worker to its caller, the process that called launch()."""

    def __init__(self, address: str) -> None:
        """Connect, and prove to each other that both know the secret of the call, before anything is unpickled.

        `address` is NAME SECRET: the name of an abstract Unix socket, and the secret in hexadecimal.
        """
        name, _, secret = address.partition(" ")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect("\0" + name)
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _pid, uid, _gid = struct.unpack("3i", credentials)
        if uid != os.geteuid():
            sys.exit("a process of another user listens at the address of the caller of launch()")
        callers_nonce, key = bytes(self._exactly(NONCE_SIZE)), bytes.fromhex(secret)
        world_size = int(os.environ["WORLD_SIZE"])
        without_proof = HELLO.pack(os.urandom(NONCE_SIZE), RANK, world_size, bytes(PROOF_SIZE))[:-PROOF_SIZE]
        said = callers_nonce + without_proof  # what is proved, so that no old proof fits: both nonces are random
        self.socket.sendall(without_proof + hmac.digest(key, b"worker" + said, "sha256"))
        expected = hmac.digest(key, b"caller" + said, "sha256")
        if not hmac.compare_digest(bytes(self._exactly(PROOF_SIZE)), expected):
            sys.exit("another process listens at the address of the caller of launch()")

    def receive(self) -> "tuple[dict[str, Any], bytearray, list[int]]":
        """Wait for the call; return the preparation, the pickle, and the descriptors that belong to it."""
        prepared, pickled, number = CALL.unpack(self._exactly(CALL.size))
        descriptors: list[int] = []
        while len(descriptors) < number:
            self._receive_some(descriptors)
        return pickle.loads(self._exactly(prepared)), self._exactly(pickled), descriptors

    def answer(self, kind: bytes, data: "bytes | bytearray | memoryview") -> None:
        """Send the answer."""
        self.socket.sendall(ANSWER.pack(kind, len(data)))
        self.socket.sendall(data)

    def _receive_some(self, descriptors: "list[int]") -> None:
        """Receive one byte, and add the descriptors that come beside that byte, DESCRIPTORS_AT_ONCE at most."""
        room = socket.CMSG_SPACE(DESCRIPTORS_AT_ONCE * struct.calcsize("i"))
        data, messages, flags, _ = self.socket.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in messages:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                number = len(content) // struct.calcsize("i")
                descriptors.extend(struct.unpack_from(f"{number}i", content))
        if flags & socket.MSG_CTRUNC:  # the kernel gives none beyond the limit of open files
            raise OSError(
                "too many open files: raise `ulimit -n`, or call torch.multiprocessing.set_sharing_strategy('file_system')"
            )
        if not data:
            raise EOFError

    def _exactly(self, size: int) -> bytearray:
        """Receive this many bytes."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            number = self.socket.recv_into(view)
            if not number:
                raise EOFError
            view = view[number:]
        return data


class Descriptor:
    """The placeholder of a descriptor in a pickle, as multiprocessing.reduction.DupFd gives it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def detach(self) -> int:
        """Return the descriptor."""
        return self.descriptor


def main() -> None:
    """Receive the call, run its function, and send back the result or the exception."""
    try:
        address, _, _import_path = os.environ.pop("DDPLAUNCH_CALL").partition("\n")
        caller = CallerConnection(address)
        call, pickled, descriptors = caller.receive()
    except (EOFError, ConnectionError):
        sys.exit("the process that called launch() is gone")
    during = ""  # what this worker does, for an exception that is not the function's own
    try:
        # shortly before the caller's timeout all stacks go to its file, the last descriptor
        if call["stacks_after"] is not None:
            faulthandler.dump_traceback_later(call["stacks_after"], file=descriptors[-1])
        # the caller's main module, which multiprocessing names in one of two ways
        main = call["preparation"].get("init_main_from_name") or call["preparation"].get("init_main_from_path")
        during = f"while it imported {main}" if main else "while it imported the caller's paths"
        become_like_caller(call)
        during = "while it unpickled the function and its arguments"
        function, args, kwargs = load(pickled, descriptors)
        del pickled
        during = ""
        result = function(*args, **kwargs)
        during = "when its result was to be sent"
        data = dump(result, call["result_limit"])
    except KeyboardInterrupt:
        sys.excepthook = silent  # the caller reports it once, for all workers
        raise
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the function raises
        fail(caller, error, during)
    else:
        faulthandler.cancel_dump_traceback_later()
        caller.answer(RESULT, data)


def become_like_caller(call: "dict[str, Any]") -> None:
    """Make this process like the caller's: import path, arguments, `__main__`, source lines that are in no file."""
    import linecache
    from multiprocessing import process, spawn

    linecache.cache.update(call["preparation"].get("sources", {}))
    current: Any = process.current_process()
    current.name = f"rank {RANK}"
    current._inheriting = True  # multiprocessing refuses to start a process while the main module is imported
    try:
        spawn.prepare(call["preparation"])
    finally:
        del current._inheriting


def load(pickled: bytearray, descriptors: "list[int]") -> "Any":
    """Unpickle the function and its arguments."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, index: int) -> Descriptor:
            return Descriptor(descriptors[index])

    return Unpickler(io.BytesIO(pickled)).load()


def fail(caller: CallerConnection, error: BaseException, during: str) -> None:
    """Record the exception as the bootstrap would, send the exception to the caller, and end with status 1.

    `during` says what this worker did for the function, "" if the function itself has raised the exception.
    """
    remove_our_frames(error)
    error_file: Any = loaded_error_module()
    description = {
        "type": error_file.type_of(error),
        "message": error_file.message_of(error),
        "traceback": error_file.callstack_of(error),
        "parts": pickled_parts(error),
        "during": during,
    }
    try:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            error_file.record(error, path)
    except Exception:  # noqa: BLE001, S110 - the caller learns of the exception anyway
        pass
    try:
        caller.answer(ERROR, pickle.dumps(description))
    except OSError:
        sys.stderr.write(description["traceback"])  # the caller cannot show it
    sys.exit(1)


def loaded_error_module() -> "ModuleType":
    """Return error_file.py beside this file as a module that is not in `sys.modules`, as the bootstrap loads it."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "error_file.py")
    importlib: Any = sys.modules["_frozen_importlib_external"]
    module = type(sys)("error_file")
    exec(importlib.SourceFileLoader("error_file", path).get_code("error_file"), module.__dict__)  # noqa: S102 - our own code
    return module


def dump(result: object, limit: int) -> memoryview:
    """Return the result, pickled by value, in at most `limit` bytes."""
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
        # types that are often returned by mistake
        advice_by_type = {"generator": "; return list(...) of it", "coroutine": "; run it with asyncio.run()"}
        advice = advice_by_type.get(type(result).__name__, "")
        raise TypeError(f"the result cannot be sent to the caller: {error}{advice}") from error
    return buffer.getbuffer()


class Limited(io.BytesIO):
    """A file in memory that refuses more than `limit` bytes."""

    class Full(Exception):
        """The file would be larger than its limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def write(self, data: "Any") -> int:
        """Write the data, if the file has room for it."""
        if self.tell() + memoryview(data).nbytes > self.limit:
            raise Limited.Full
        return super().write(data)


class OnDevice(Exception):
    """A tensor on a device cannot be sent by value."""


def pickler(buffer: io.BytesIO) -> "pickle.Pickler":
    """Return a pickler that refuses tensors which are not on the CPU."""
    base: Any = pickle.Pickler
    if "cloudpickle" in sys.modules:  # it sent the function, which may return an object of a class that it defines
        base = sys.modules["cloudpickle"].Pickler

    class Pickler(base):  # type: ignore[misc]  # the base is known only at run time
        def reducer_override(self, value: "Any") -> object:
            tensor = getattr(sys.modules.get("torch"), "Tensor", ())  # (): torch is not imported
            if isinstance(value, tensor) and value.device.type != "cpu":
                raise OnDevice(f"the result holds a tensor on {value.device}: return tensor.cpu()")
            if hasattr(base, "reducer_override"):  # cloudpickle's
                return super().reducer_override(value)
            return NotImplemented  # pickle's own way

    return Pickler(buffer, pickle.HIGHEST_PROTOCOL)


def pickled_parts(error: BaseException) -> "bytes | None":
    """Pickle type, args and attributes of the exception; None if that is not possible. Traceback, cause and notes go as text.

    An exception that is pickled as a whole cannot be unpickled if its `__init__` takes other arguments than `args` holds.
    """
    attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
    for kind in type(error).__mro__:
        if kind is not BaseException:  # attributes outside the instance's dictionary, such as the errno of an OSError
            for name, member in vars(kind).items():
                value = getattr(error, name, None) if isinstance(member, MemberDescriptorType) else None
                if value is not None:  # an OSError would print a file name of None
                    attributes[name] = value
    try:
        buffer = Limited(ERROR_LIMIT)
        pickler(buffer).dump((type(error), error.args, attributes))
        data = buffer.getvalue()
        pickle.loads(data)  # try it: the caller shows the text of what it cannot unpickle
        return data
    except Exception:  # noqa: BLE001 - it is the code of the exception
        return None


def remove_our_frames(error: BaseException) -> None:
    """Take our frames off the traceback, and the frames that import the main module."""
    ours = os.path.dirname(os.path.abspath(__file__))
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if os.path.dirname(file) != ours and not file.endswith(
            ("multiprocessing/spawn.py", "runpy.py", "<frozen runpy>")
        ):
            break
        trace = trace.tb_next
    error.__traceback__ = trace


def silent(kind: "type[BaseException]", value: BaseException, trace: "TracebackType | None") -> None:
    """Print nothing, as an excepthook."""


if __name__ == "__main__":
    main()
