"""Has a process group outlive the DDP models that use it. Imports no torch.

A gloo group that ends waits for its threads. One of them may still have to release Python's context of a backward pass, which a
collective of a newer torch has kept, and needs the GIL for it. What Python holds of a group lets go of the GIL before the group
ends; the reducer of a DDP model does not, and where the program has destroyed the group before the model ends, it is the last
that holds it: the process never exits.
"""

import functools
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def outlived_by_groups(distributed: "Any") -> None:
    """Let go of the group of each reducer once the reducer has ended; `distributed` is torch.distributed."""
    if not hasattr(distributed, "Reducer"):  # a torch without process groups
        return
    held: dict[int, tuple[Any, ...]] = {}

    def release(reference: "Any") -> None:
        del held[id(reference)]

    def hold(user: "Any", *objects: "Any") -> None:
        reference = weakref.ref(user, release)  # called when what C++ has of it is gone
        held[id(reference)] = (reference, *objects)

    def after(kind: type, name: str, then: "Callable[[Any, Any], None]", position: int) -> None:
        original = getattr(kind, name)

        @functools.wraps(original)
        def extended(self: "Any", *args: "Any", **named: "Any") -> None:
            original(self, *args, **named)
            try:
                then(self, args[position])
            except Exception:  # noqa: BLE001, S110 - not the torch that we know: nothing is held
                pass

        setattr(kind, name, extended)

    def of_reducer(reducer: "Any", group: "Any") -> None:
        # the last one ends first: a group of older torch keeps the GIL when it ends, its backends do not
        hold(reducer, *map(group._get_backend, group._device_types), group)

    after(distributed.Reducer, "__init__", of_reducer, 3)
    after(distributed.Reducer, "_update_process_group", of_reducer, 0)
    after(distributed.Logger, "__init__", hold, 0)  # it keeps the reducer
