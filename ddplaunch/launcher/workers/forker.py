"""Part of the agent that starts or finds what forks its workers, waits for that, and does without it where it cannot serve.

The best is the guard of an interpreter that is kept warm, next a fork server of this job; without either, workers are fresh
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from ddplaunch.launcher.workers.servers import Fork, ForkServer, Guard, ServerLost
from ddplaunch.plan import Plan
from ddplaunch.plan.variables import of_fork_server
from ddplaunch.system.loop.loop import Loop
from ddplaunch.system.process.child import StartError

if TYPE_CHECKING:
    from ddplaunch.launcher.tell.reporter import Reporter
    from ddplaunch.launcher.workers.warm import Interpreter
    from ddplaunch.system.process.child import Child
    from ddplaunch.system.process.tree import Process

SLOW_IMPORTS = 10.0  # seconds of imports that are worth a word


class ForkerOwner(Protocol):
    """Who has workers forked, and looks which of them have ended."""

    def on_guard_over(self) -> None:
        """Look: a guard has ended, and with it all that was below it, without a SIGCHLD for this process."""


class Forker:
    """A fork server, or the guard of an interpreter that is kept warm (a process of it that forks the workers of one run).

    It lives on, for the next generation (start of all workers), until `close`.
    """

    def __init__(
        self, loop: Loop, reporter: Reporter, owner: ForkerOwner, warm: Interpreter | None, front_pipe: int
    ) -> None:
        """Start nothing yet. A guard keeps `front_pipe` open while it lives: a front reads to the end of this pipe."""
        self._loop = loop
        self._reporter = reporter
        self._owner = owner
        self._warm = warm  # the interpreter that is kept warm; None once it is not to be used any more
        self._front_pipe = front_pipe
        self._user_asked_for_server = True  # by an option; else nobody needs to know of a fork server that is lost
        self._server: ForkServer | Guard | None = None  # what forks the next workers; None: they are fresh processes
        self._guard: Guard | None = None  # the parent of workers, even where it forks no more
        # interpreter, modules and variables for which a server was started, or could not be; None before the first
        self._wanted_for: tuple[object, ...] | None = None
        self._start_server: Callable[[], ForkServer]
        self._why_lost = ""  # why there is no server, until that was printed; "": there is nothing to print
        self._late_timer = loop.timer(None, self._on_late)

    def prepare(self, plan: Plan, env_of_command: Mapping[str, str], handled: Collection[int]) -> None:
        """Prepare a generation: keep a fork server that fits; end any other, and start a new one if the plan wants it.

        `handled` are the signals that this process has a handler for: what it starts begins without.
        """
        if plan.preload is None:  # workers are to be fresh processes
            self.close()
            return
        self._user_asked_for_server = plan.preload_is_asked
        argv, env = plan.workers[0].argv, of_fork_server(env_of_command, plan)
        interpreter, modules = argv[0], plan.preload
        wanted = (interpreter, modules, env)
        if wanted == self._wanted_for:
            return
        is_first = self._wanted_for is None
        if not is_first:
            self._warm = None  # the warm interpreter was chosen for the plan of the first generation, which this one differs from
        self.close()
        self._wanted_for = wanted
        self._start_server = partial(ForkServer, argv, env, modules, handled=handled)
        self._start()

    def _start(self) -> None:
        """Start the fork server, or have the warm interpreter fork a guard; `_on_late` follows if it is not ready in time."""
        within = SLOW_IMPORTS  # while it imports modules
        try:
            if self._warm is None:
                self._server = self._start_server()
            else:
                from ddplaunch.launcher.workers import warm

                # the guard keeps this pipe open while it lives: the front waits for its end
                self._server = warm.guard_at(self._warm, self._front_pipe)
                if not self._warm.is_new:  # it has imported everything, and answers at once
                    within = warm.ANSWER_WITHIN
        except (StartError, ServerLost) as error:
            self._do_without(str(error))
            return
        self._loop.watch(self._server, partial(self._on_readable, self._server))
        self._late_timer.set(self._loop.now() + within)

    def _on_late(self) -> None:
        """Say that the imports, for which the workers wait, take long; do without a warm interpreter that is silent."""
        if self._server is None or self._server.is_ready:
            return
        if self._warm is not None and not self._warm.is_new:
            self._do_without("it does not answer")
            return
        # a guard's pid is 0 until it has been forked and says so
        imports = f"the fork server (pid {self._server.pid})" if self._server.pid else "the interpreter to be kept warm"
        self._reporter.print(
            f"{imports} is still importing after {SLOW_IMPORTS:g} s; --start-method spawn does without it"
        )

    @property
    def forks_workers(self) -> bool:
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
        """Return the processes below a guard: they are not below this one."""
        return self._guard.leftovers() if self._guard is not None else []

    def fork(self, forks: Sequence[Fork]) -> Sequence[Child]:
        """Fork workers, which begin together; return () if nothing can fork them: then they have to be fresh processes.

        Raises StartError: the machine cannot create another process.
        """
        if self._server is not None:
            try:
                return self._server.fork(forks)
            except ServerLost as error:
                self._end_server(str(error))  # sets `_why_lost`
        if self._why_lost and self._user_asked_for_server:
            self._reporter.print(f"workers are started as fresh processes, not by the fork server: {self._why_lost}")
        self._why_lost = ""
        return ()

    def _on_readable(self, server: ForkServer | Guard) -> None:
        """Read what the fork server or the guard has sent; deal with its loss. Called by the loop."""
        try:
            server.read()
            if isinstance(server, Guard) and server.is_ready and self._guard is None:
                self._use_guard(server)
        except ServerLost as error:
            if server is self._guard:  # it has begun to serve, and the workers have ended with it
                self._loop.unwatch(server)
                self._guard.is_over = True
                self._end_server(str(error))  # later workers are fresh processes
                self._owner.on_guard_over()
            else:  # the next best forks the workers, or nothing
                self._do_without(str(error))
            return
        if server.is_ready:
            self._late_timer.cancel()
        while server.notes and self._user_asked_for_server:
            self._reporter.print(f"not imported by the fork server: {server.notes.pop(0)}")

    def _use_guard(self, guard: Guard) -> None:
        """Have a guard that is ready take over our surroundings; ServerLost: what it has inherited is not what we have."""
        from ddplaunch.launcher.workers import warm

        warm.check_same(guard.pid)
        guard.send_surroundings()
        self._guard = guard

    def _do_without(self, why: str) -> None:
        """Do without a warm interpreter by a fork server, and without a fork server by fresh processes."""
        self._end_server(why)
        if self._warm is not None:
            self._warm = None
            self._why_lost = ""
            self._reporter.print(f"the interpreter that is kept warm is not used, and another one imports again: {why}")
            self._start()

    def _end_server(self, why: str) -> None:
        """End the server; `why` is for the user, once a worker has to be a fresh process."""
        self._why_lost = why
        self._close_server()

    def fork_no_more(self) -> None:
        """End a fork server; a guard is the parent of the workers, and stays."""
        if self._guard is None:
            self.close()

    def close(self) -> None:
        """End the fork server or the guard, if there is one, for good."""
        self._wanted_for = None
        self._close_server()
        guard, self._guard = self._guard, None
        if guard is not None:
            if not guard.is_over:
                self._loop.unwatch(guard)
            guard.close()

    def _close_server(self) -> None:
        server, self._server = self._server, None
        self._late_timer.cancel()
        if server is not None and server is not self._guard:
            self._loop.unwatch(server)
            server.close()
