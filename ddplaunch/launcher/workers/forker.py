"""What forks the workers of this node: it is started or found, waited for, and done without where it cannot serve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.launcher.workers.servers import Fork, ForkServer, Guard, ServerLost
from ddplaunch.plan import Plan
from ddplaunch.plan.variables import of_fork_server
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.child import StartError

if TYPE_CHECKING:
    from ddplaunch.launcher.workers.warm import Interpreter
    from ddplaunch.system.process.child import Child
    from ddplaunch.system.process.tree import Process

SLOW = 10.0  # seconds of imports that are worth a word


class Forker:
    """A fork server, or the guard of an interpreter that is kept warm; lives on, for the next generation, until `close`."""

    def __init__(
        self,
        loop: Loop,
        note: Callable[[str], None],
        warm: Interpreter | None,
        output: int,
        nothing_left: Callable[[], None],
    ) -> None:
        """`note` shows a line to the user; `output` is a descriptor that a guard keeps open.

        `nothing_left` is called when a guard has ended, with all that was below it.
        """
        self._loop = loop
        self._note = note
        self._warm = warm  # until it is not to be used any more
        self._output = output
        self._post_guard_over = nothing_left
        self._is_asked = True
        self._server: ForkServer | Guard | None = None
        self._guard: Guard | None = None  # the parent of workers, even where it forks no more
        self._wanted: tuple[object, ...] | None = None  # what the server was started for, or failed to be
        self._start_server: Callable[[], ForkServer]
        self._why_lost = ""  # while no worker has had to do without it
        self._is_late = loop.timer(None, self._say_that_it_takes_long)

    def prepare(self, plan: Plan, caller: Mapping[str, str], handled: Collection[int]) -> None:
        """Prepare a generation: keep a fork server that fits; end any other, and start a new one if the plan wants it.

        `handled` are the signals that this process has a handler for.
        """
        if plan.preload is None:
            return self.close()
        self._is_asked = plan.preload_is_asked
        argv, env = plan.workers[0].argv, of_fork_server(caller, plan)
        wanted = (argv[0], plan.preload, env)
        if wanted == self._wanted:
            return None
        if self._wanted is not None:
            self._warm = None  # the warm interpreter fitted the plan of the first generation only
        self.close()
        self._wanted = wanted
        self._start_server = partial(ForkServer, argv, env, plan.preload, handled=handled)
        return self._begin()

    def _begin(self) -> None:
        """Start the fork server, or connect to the interpreter that is kept warm; note when that takes long."""
        within = SLOW
        try:
            if self._warm is None:
                self._server = self._start_server()
            else:
                from ddplaunch.launcher.workers import warm

                self._server = warm.guard_at(self._warm, self._output)
                within = SLOW if self._warm.is_new else warm.ANSWER_WITHIN
        except (StartError, ServerLost) as error:
            return self._lose(str(error))
        self._loop.watch(self._server, partial(self._on_readable, self._server))
        self._is_late.set(self._loop.now() + within)
        return None

    def _say_that_it_takes_long(self) -> None:
        """Say, once, that the imports take long: without them no worker is started. What is warm already has them."""
        if self._server is None or self._server.is_ready:
            return
        if self._warm is not None and not self._warm.is_new:
            self._lose("it does not answer")
            return
        imports = f"the fork server (pid {self._server.pid})" if self._server.pid else "the interpreter to be kept warm"
        self._note(f"{imports} is still importing after {SLOW:g} s; --start-method spawn does without it")

    @property
    def is_there(self) -> bool:
        """Whether workers are forked."""
        return self._server is not None

    @property
    def is_ready(self) -> bool:
        """Whether workers can be started now."""
        return self._server is None or self._server.is_ready

    @property
    def pids(self) -> frozenset[int]:
        """The process of the server, which is no leftover of a worker."""
        return frozenset(() if self._server is None else (self._server.pid,))

    def leftovers(self) -> list[Process]:
        """Return what is below a guard, which is not below us."""
        return self._guard.leftovers() if self._guard is not None else []

    def fork(self, forks: Sequence[Fork]) -> Sequence[Child]:
        """Fork workers, which begin together; return () if they are to be fresh processes.

        Raises:
            StartError: the machine cannot create another process.
        """
        if self._server is not None:
            try:
                return self._server.fork(forks)
            except ServerLost as error:
                self._give_up(str(error))
        if self._why_lost and self._is_asked:
            self._note(f"workers are started as fresh processes, not by the fork server: {self._why_lost}")
        self._why_lost = ""
        return ()

    def _on_readable(self, server: ForkServer | Guard) -> None:
        """Read what the fork server or the guard has sent; deal with its loss. Called by the loop."""
        try:
            server.read()
        except ServerLost as error:
            if server is self._guard:
                self._loop.unwatch(server)
                self._guard.is_over = True
                self._give_up(str(error))
                self._post_guard_over()
            else:
                self._lose(str(error))
            return
        if server.is_ready:
            self._is_late.cancel()
            if self._warm is not None:
                self._guard = server  # type: ignore[assignment]  # what is warm has no other
        while server.notes and self._is_asked:
            self._note(f"not imported by the fork server: {server.notes.pop(0)}")

    def _lose(self, why: str) -> None:
        """Do without what was to fork the workers: without what is warm by a server, without that by fresh processes."""
        self._give_up(why)
        if self._warm is not None:
            self._warm = None
            self._why_lost = ""
            self._note(f"the interpreter that is kept warm is not used, and another one imports again: {why}")
            self._begin()

    def _give_up(self, why: str) -> None:
        self._why_lost = why
        self._end()

    def fork_no_more(self) -> None:
        """End what forks the workers if it is not their parent."""
        if self._guard is None:
            self.close()

    def close(self) -> None:
        """End what forks the workers, if there is anything, for good."""
        self._wanted = None
        self._end()
        guard, self._guard = self._guard, None
        if guard is not None:
            if not guard.is_over:
                self._loop.unwatch(guard)
            guard.close()

    def _end(self) -> None:
        server, self._server = self._server, None
        self._is_late.cancel()
        if server is not None and server is not self._guard:
            self._loop.unwatch(server)
            server.close()
