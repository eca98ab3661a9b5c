"""`ddplaunch check`, in the one worker it runs at a time: notes what a program asks of process groups that nobody else is in.

The program runs as one rank of a job whose other ranks are not there. All groups are torch's fake ones, whatever backend the
program names. A group answers at once and sends nothing: what is reduced keeps its value, what is gathered is this rank's own,
and what is received is zero. Objects that a checked rank broadcasts or scatters reach the ranks that are checked after it.

torch sends each collective, from Python and from C++ (DDP's reducer), through the dispatcher as an operator of the namespace
c10d. A kernel at the key BackendSelect, the last before the backends, notes the call and hands it on. The notes are lines of
JSON, which `tools/check/notes.py` reads. Each is written at once, so that they outlast whatever ends the program.
"""

import faulthandler
import functools
import inspect
import json
import os
import pickle
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

MOST_CALLS = 50_000
MOST_FRAMES = 40  # of a stack, from the innermost on
LONGEST = 300  # characters of a text
# of an operator of torch's namespace c10d: its name in Python, the argument for what the rank gives, and that for what it gets.
# Only what must be equal on all ranks is named, so of all_gather not the list of outputs
OPERATORS = {
    "allreduce_": ("all_reduce", "tensors", ""),
    "allreduce_coalesced_": ("all_reduce_coalesced", "tensors", ""),
    "broadcast_": ("broadcast", "tensors", ""),
    "reduce_": ("reduce", "tensors", ""),
    "allgather_": ("all_gather", "input_tensors", ""),
    "allgather_coalesced_": ("all_gather_coalesced", "input_list", ""),
    "_allgather_base_": ("all_gather_into_tensor", "input_tensor", "output_tensor"),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", "inputs", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "", "output_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "inputs", "outputs"),
    "gather_": ("gather", "input_tensors", ""),
    "scatter_": ("scatter", "", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": ("all_to_all_single", "input", "output"),
    "barrier": ("barrier", "", ""),
    "send": ("send", "tensors", ""),
    "recv_": ("recv", "", "tensors"),
    "recv_any_source_": ("recv_any_source", "", "tensors"),
}
OUTPUTS_LEFT_UNSET = ("scatter_", "recv_", "recv_any_source_")  # by the fake group


def begin(load_sibling: "Callable[[str], ModuleType]", steps: str, seconds: str, path: str) -> None:
    """Check the program that is to run: for so many steps, in at most so many seconds, with its notes in the file at `path`.

    A rank that takes longer writes its stacks to the file PATH.late, and is ended by faulthandler's thread, which needs no GIL.
    """
    late = os.open(path + ".late", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.dump_traceback_later(float(seconds), exit=True, file=late)
    notes = Notes(path, int(steps))
    when_imported = load_sibling("imports").when_imported
    our_distributed = load_sibling("distributed")

    def prepare(torch: "Any") -> None:
        """Change torch once the program has imported it: groups become fake, and steps and checkpoints may end the check."""
        try:
            import torch.distributed  # some versions of torch leave that to the program

            if torch.distributed.is_available():
                Groups(torch, notes, our_distributed)
            stop_at_steps(notes)
            stop_at_saves(torch, ("save",), notes)
            stop_at_saves(torch.serialization, ("save",), notes)
        except Exception as error:  # noqa: BLE001 - without the changes the program would wait for other ranks
            os.write(2, f"ddplaunch check does not know torch {torch.__version__}: {error!r}\n".encode())
            os._exit(1)

    when_imported("torch", prepare)
    for module in ("torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_saver"):
        saves = ("save", "async_save", "save_state_dict")
        when_imported(module, functools.partial(stop_at_saves, names=saves, notes=notes))
    when_imported("safetensors.torch", functools.partial(stop_at_saves, names=("save_file", "save_model"), notes=notes))


HERE = begin.__code__.co_filename


class Notes:
    """The notes of this rank, in a file. What a forked child does is not noted."""

    def __init__(self, path: str, steps: int) -> None:
        self.folder = os.path.dirname(path)
        self.steps = steps
        self.step = 1  # that the program works on
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._pid = os.getpid()
        self._calls = 0
        self._stacks: dict[tuple[tuple[str, int, str], ...], int] = {}

    def write(self, kind: str, **fields: object) -> None:
        """Write one note."""
        if os.getpid() == self._pid:
            os.write(self._fd, json.dumps({kind: fields}).encode() + b"\n")

    def call(self, operation: str, group: str, **fields: object) -> None:
        """Note what the program asks of a group, and from where."""
        if os.getpid() != self._pid:
            return
        self.write("call", operation=operation, group=group, step=self.step, **self.stack(), **fields)
        self._calls += 1
        if self._calls == MOST_CALLS:
            self.end("calls")

    def stack(self) -> "dict[str, object]":
        """Return, for a note, the number of the caller's stack, and its frames without ours when it is new."""
        frame = sys._getframe(1)
        frames: list[tuple[str, int, str]] = []
        while frame is not None and len(frames) < MOST_FRAMES:
            code = frame.f_code
            if code.co_filename != HERE:
                frames.append((code.co_filename[:LONGEST], frame.f_lineno, code.co_name[:LONGEST]))
            frame = frame.f_back  # type: ignore[assignment]
        stack = tuple(frames)
        if stack in self._stacks:
            return {"stack": self._stacks[stack]}
        self._stacks[stack] = len(self._stacks)
        return {"stack": self._stacks[stack], "frames": stack}

    def end(self, why: str) -> None:
        """End the check of this rank, before the program does anything more."""
        if os.getpid() == self._pid:
            self.write("progress", steps=self.step - 1, end=why, **self.stack())
            os._exit(0)


def stop_at_steps(notes: Notes) -> None:
    """End the check once an optimizer has done as many steps as are wanted. Of several, the one with most steps counts."""
    from torch.optim.optimizer import register_optimizer_step_post_hook  # torch has imported it, and hides the module

    steps: dict[int, int] = {}  # by the id of the optimizer

    def count(optimizer: "Any", *_: object) -> None:
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
        done = max(steps.values())
        notes.step = done + 1
        if done >= notes.steps:
            notes.end("steps")
        notes.write("progress", steps=done)

    register_optimizer_step_post_hook(count)


def stop_at_saves(module: "Any", names: "Sequence[str]", notes: Notes) -> None:
    """End the check when the program calls one of these functions."""
    for name in names:
        if hasattr(module, name):
            setattr(module, name, functools.wraps(getattr(module, name))(lambda *_, **__: notes.end("saves")))


class GroupTable(dict):  # type: ignore[type-arg]  # of any Python from 3.8 on
    """torch's table of the ranks of each process group, which has `groups` note each group that torch adds."""

    def __init__(self, table: "Mapping[Any, Any]", groups: "Groups") -> None:
        dict.__init__(self, table)  # of another class in our place it would be called with what is for ours
        vars(self).update(getattr(table, "__dict__", {}))
        self._groups = groups

    def __setitem__(self, group: "Any", ranks: "Any") -> None:
        super().__setitem__(group, ranks)
        if hasattr(group, "group_name"):  # a number stands for all groups that this rank is not in
            self._groups.note_group(group, ranks)


class Groups:
    """Makes every process group of the program a fake one, and notes what the program asks of it. Constructed once."""

    def __init__(self, torch: "Any", notes: Notes, our_distributed: "ModuleType") -> None:
        """Replace torch's functions. `our_distributed` is the file beside this one, which this file cannot import."""
        self._torch = torch
        self._dist = torch.distributed
        self._c10d = torch.distributed.distributed_c10d
        self._notes = notes
        self._ranges_of: Callable[[Iterable[int]], str] = our_distributed.ranges_of
        self._ranks: dict[str, dict[int, int]] = {}  # by the name of a group: rank in the job by rank in the group
        # how often a rank has sent objects to a group, by the group's name and the rank
        self._sent: dict[tuple[str, int], int] = {}
        self._library = torch.library.Library("c10d", "IMPL")  # the kernels live as long as it does
        table = self._c10d._pg_group_ranks
        class_of_ours = our_distributed.class_in_place_of(table, GroupTable)
        self._c10d._pg_group_ranks = class_of_ours(table, self)
        self._c10d.rendezvous = self._dist.rendezvous = self._rendezvous  # programs call it, too, as ours does
        self._make_group = self._c10d._new_process_group_helper
        self._signature = inspect.signature(self._make_group)
        self._c10d._new_process_group_helper = self._make_fake
        for name in OPERATORS:
            if hasattr(torch.ops.c10d, name):
                kernel = self._kernel(name, getattr(torch.ops.c10d, name).default)
                self._library.impl(name, kernel, "BackendSelect", with_keyset=True)
        replaced = (  # each by the method of this class with that name
            "broadcast_object_list",
            "scatter_object_list",
            "gather_object",
            "all_gather_object",
            "monitored_barrier",
        )
        for name in replaced:
            function = functools.wraps(getattr(self._c10d, name))(functools.partial(getattr(self, "_" + name)))
            setattr(self._c10d, name, function)
            setattr(self._dist, name, function)

    # --- groups

    def _rendezvous(self, url: str, rank: int = -1, world_size: int = -1, **_: object) -> "Iterable[Any]":
        """Meet nobody: yield a store of this process alone, and the place in the job that is checked."""
        place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        given = (place[0] if rank < 0 else rank), (place[1] if world_size < 0 else world_size)
        if given != place:
            raise ValueError(
                f"init_process_group was given rank {given[0]} of {given[1]}, but this is rank {place[0]} of {place[1]}"
            )
        yield self._dist.HashStore(), *given

    def _make_fake(self, *args: object, **kwargs: object) -> "Any":
        """Make a group with torch's own function, but with the fake backend."""
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers it

        bound = self._signature.bind(*args, **kwargs)
        given = bound.arguments
        for option in ("backend_options", "pg_options", "device_id"):  # of the backend that was asked for
            given.pop(option, None)
        given["backend"] = "fake"
        ranks, name = given["global_ranks_in_group"], str(given["group_name"])
        # [] are all ranks, as for the default group. A name that is no number is a hash: of a group whose members alone make it
        is_made_by_all_ranks = bool(ranks) and name.isdecimal()
        if is_made_by_all_ranks:
            members = self._ranges_of(ranks)
            if len(members) > LONGEST:
                members = f"{members[:LONGEST]}..., {len(ranks)} in all"
            self._notes.call("new_group", self._c10d.GroupMember.WORLD.group_name, members=members)
        return self._make_group(*bound.args, **bound.kwargs)

    def note_group(self, group: "Any", ranks: "Mapping[int, int]") -> None:
        """Note the name, members and title of a group; `ranks` holds rank in the group by rank in the job."""
        name = group.group_name
        self._ranks[name] = {in_group: in_job for in_job, in_group in ranks.items()}
        title = str(getattr(group, "group_desc", ""))[:LONGEST]
        is_of_program = title not in ("undefined", "default_pg")  # torch's words where the program says nothing
        self._notes.write(
            "group",
            name=name,
            members=self._ranges_of(ranks),
            title=title if is_of_program else "",
        )

    # --- collectives

    def _kernel(self, name: str, operator: "Any") -> "Callable[..., Any]":
        """Return the function that torch calls for this operator: it notes the call, and hands it on to the fake group.

        `name` is a key of OPERATORS; `operator` is torch's own.
        """
        c10d = self._torch._C._distributed_c10d
        operation, input_name, output_name = OPERATORS[name]
        # of each argument in a call of the operator
        position_of = {argument.name: number for number, argument in enumerate(operator._schema.arguments)}
        peer_position = next((position_of[word] for word in ("root_rank", "dst", "src") if word in position_of), None)
        key = self._torch._C.DispatchKey.BackendSelect
        keys_after_ours = self._torch._C._dispatch_keyset_full_after(key)

        def note(args: "Sequence[Any]") -> None:
            """Note a call with these arguments: its group, the other rank and tag if there are any, what goes in and out."""
            group = c10d.ProcessGroup.unbox(args[position_of["process_group"]]).group_name
            fields = {}
            if peer_position is not None:
                rank_in_group = args[peer_position]
                fields["peer"] = self._ranks[group].get(rank_in_group, rank_in_group)  # by the rank in the job
            if "tag" in position_of:
                fields["tag"] = args[position_of["tag"]]
            for field, argument in (("inputs", input_name), ("outputs", output_name)):
                if argument:  # "": all ranks need not give or get the same
                    fields[field] = describe(args[position_of[argument]])
            self._notes.call(operation, group, **fields)

        def kernel(keys: "Any", *args: "Any", **kwargs: "Any") -> "Any":
            """Note the call, hand it to the fake group, fill tensors that this leaves unset, and return a work that is done."""
            note(args)
            result = operator.redispatch(keys & keys_after_ours, *args, **kwargs)
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            if name in OUTPUTS_LEFT_UNSET:
                for tensor in tensors:
                    tensor.zero_()
            elif name == "alltoall_base_" and args[0].shape == args[1].shape:  # output and input
                args[0].copy_(args[1])
            if name == "barrier":  # its tensor is torch's own, which no program sees
                return result
            # DDP's reducer takes its tensors from the future of the work; that of a fake work is empty
            future = self._torch._C.Future([])
            future.set_result(tensors)
            work = c10d._create_work_from_future(future).boxed()
            return (result[0], work) if isinstance(result, tuple) else work  # some operators return their tensors, too

        return kernel

    # --- objects, which torch sends as tensors, and could not unpickle where nothing was received

    def _monitored_barrier(self, group: "Any" = None, *_: object, **__: object) -> None:
        if (name := self._name(group)) is not None:
            self._notes.call("monitored_barrier", name)

    def _all_gather_object(self, object_list: "list[Any]", obj: "Any", group: "Any" = None) -> None:
        if (name := self._name(group)) is not None:
            self._notes.call("all_gather_object", name)
            object_list[:] = [obj] * len(object_list)

    def _gather_object(
        self,
        obj: "Any",
        object_gather_list: "Any" = None,
        dst: "Any" = None,
        group: "Any" = None,
        group_dst: "Any" = None,
    ) -> None:
        if (name := self._name(group)) is not None:
            self._notes.call("gather_object", name, peer=self._root(name, dst, group_dst))
            if object_gather_list:
                object_gather_list[:] = [obj] * len(object_gather_list)

    def _broadcast_object_list(
        self,
        object_list: "list[Any]",
        src: "Any" = None,
        group: "Any" = None,
        device: "Any" = None,
        group_src: "Any" = None,
    ) -> None:
        if (name := self._name(group)) is not None:
            objects = self._from_root("broadcast_object_list", name, self._root(name, src, group_src), object_list)
            if objects is not None:
                object_list[:] = objects

    def _scatter_object_list(
        self,
        scatter_object_output_list: "list[Any]",
        scatter_object_input_list: "Any" = None,
        src: "Any" = None,
        group: "Any" = None,
        group_src: "Any" = None,
    ) -> None:
        if (name := self._name(group)) is not None:
            root = self._root(name, src, group_src)
            objects = self._from_root("scatter_object_list", name, root, scatter_object_input_list)
            if objects is not None:
                scatter_object_output_list[0] = objects[self._dist.get_rank(group)]

    def _from_root(self, operation: str, name: str, root: int, objects: "Any") -> "Any":
        """Note a call that sends objects from rank `root` to the group `name`, and return them; None if `root` was not checked.

        Ranks are checked one after another: `root` leaves its objects in a file, in which the ranks after it find them.
        """
        number = self._sent[name, root] = self._sent.get((name, root), 0) + 1
        path = os.path.join(self._notes.folder, f"objects-{name}-{root}-{number}")
        if root == self._dist.get_rank():
            self._notes.call(operation, name, peer=root)
            with open(path, "wb") as file:
                pickle.dump(objects, file)
            return objects
        try:
            with open(path, "rb") as file:
                received = pickle.load(file)
        except Exception:  # noqa: BLE001 - it was not sent, or only half
            received = None
        self._notes.call(operation, name, peer=root, got_nothing=received is None)
        return received

    def _name(self, group: "Any") -> "str | None":
        """Return the name of a group; None if this rank is not in it."""
        group = group or self._c10d.GroupMember.WORLD
        if group is None:
            raise ValueError(
                "Default process group has not been initialized, please make sure to call init_process_group."
            )
        return None if group is self._c10d.GroupMember.NON_GROUP_MEMBER else str(group.group_name)

    def _root(self, name: str, rank: "int | None", in_group: "int | None") -> int:
        return self._ranks[name][in_group] if in_group is not None else rank or 0


def describe(value: "Any") -> str:
    """Write the tensors in an argument: "float32 [4096, 4096]", "3 x float32 [4]"."""
    tensors = list(flat(value))
    texts = [f"{str(tensor.dtype).replace('torch.', '')} {list(tensor.shape)}" for tensor in tensors]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{len(texts)} x {texts[0]}"[:LONGEST]
    return ", ".join(texts)[:LONGEST]


def flat(value: "Any") -> "Iterable[Any]":
    """Yield the tensors in lists of lists."""
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(one, (list, tuple)):
            yield from flat(one)
        else:
            yield one
