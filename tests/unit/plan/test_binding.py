from collections.abc import Container, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.plan.binding import TORCHRUN_MODES, Binding, bind
from ddplaunch.plan.devices import Core, Device
from ddplaunch.system.errors import LaunchError

Job = tuple[list[Core], list[Device], list[tuple[Device, ...]]]  # cores, all devices, those of each worker

MODES = ("cores", "numa", *TORCHRUN_MODES)


def machine(
    *, sockets: int = 1, nodes: int = 1, cores: int, smt: int = 1, cache: int = 0, allowed: Container[int] | None = None
) -> list[Core]:
    """The cores of `sockets` with `nodes` each of `cores` each, `cache` of them on one cache (0: a node's), numbered as
    Linux does: first one thread of every core, then the next ones."""
    total = sockets * nodes * cores
    result = []
    for first in range(total):
        node, in_node = divmod(first, cores)
        cpus = tuple(cpu for cpu in range(first, smt * total, total) if allowed is None or cpu in allowed)
        if cpus:
            lowest = first - in_node % (cache or cores)
            result.append(Core(cpus=cpus, numa_node=node, package=node // nodes, cache=lowest))
    return result


def gpu(index: int, cpus: Iterable[int] = ()) -> Device:
    return Device(kind="cuda", index=index, visible_as=str(index), cpus=tuple(cpus))


def gpus(*near: Iterable[int]) -> list[Device]:
    return [gpu(index, cpus) for index, cpus in enumerate(near)]


def one_each(devices: Iterable[Device]) -> list[tuple[Device, ...]]:
    return [(device,) for device in devices]


def run(*ranges: tuple[int, int]) -> tuple[int, ...]:
    """CPUs from ranges as people write them, both ends included."""
    return tuple(cpu for first, last in ranges for cpu in range(first, last + 1))


def cpu_only(mode: str, workers: int, cores: list[Core]) -> Binding:
    return bind(mode, [()] * workers, cores, all_devices=())


# two sockets of 32 cores with two threads each: CPUs 0-31 and 64-95, 32-63 and 96-127; eight GPUs, four near each
NEAR_0, NEAR_1 = run((0, 31), (64, 95)), run((32, 63), (96, 127))
DGX = machine(sockets=2, cores=32, smt=2, cache=8)
DGX_GPUS = gpus(*[NEAR_0] * 4, *[NEAR_1] * 4)


def test_none_binds_no_worker_and_needs_no_cores() -> None:
    assert bind("none", [(), ()], [], all_devices=()) == Binding(cpus=((), ()))


def test_unknown_cores_are_an_error() -> None:
    with pytest.raises(LaunchError) as error:
        cpu_only("cores", 2, [])
    assert (
        error.value.render()
        == "error: --cpu-bind cores: the cores of this node are not known\n\nhint: --cpu-bind none\n"
    )


class TestEightGpusOnTwoSockets:
    @pytest.mark.parametrize("mode", ["cores", "exclusive"])
    def test_each_worker_has_eight_cores_near_its_gpu(self, mode: str) -> None:
        binding = bind(mode, one_each(DGX_GPUS), DGX, all_devices=DGX_GPUS)
        assert binding == Binding(cpus=tuple(run((8 * i, 8 * i + 7), (8 * i + 64, 8 * i + 71)) for i in range(8)))

    def test_cores_counts_only_the_gpus_of_the_job_and_exclusive_all(self) -> None:
        two = one_each(DGX_GPUS[:2])
        assert bind("cores", two, DGX, all_devices=DGX_GPUS).cpus == (run((0, 15), (64, 79)), run((16, 31), (80, 95)))
        assert bind("exclusive", two, DGX, all_devices=DGX_GPUS).cpus == (run((0, 7), (64, 71)), run((8, 15), (72, 79)))

    @pytest.mark.parametrize("mode", ["numa", "node", "socket"])
    def test_whole_nodes_are_those_near_the_gpu(self, mode: str) -> None:
        assert bind(mode, one_each(DGX_GPUS), DGX, all_devices=DGX_GPUS).cpus == (NEAR_0,) * 4 + (NEAR_1,) * 4

    def test_the_order_of_the_gpus_decides_not_the_local_rank(self) -> None:
        assert bind("numa", one_each([DGX_GPUS[5], DGX_GPUS[0]]), DGX, all_devices=DGX_GPUS).cpus == (NEAR_1, NEAR_0)

    def test_each_gpu_of_a_node_gets_another_core_complex(self) -> None:
        cpus = bind("core-complex", one_each(DGX_GPUS), DGX, all_devices=DGX_GPUS).cpus
        assert cpus == tuple(run((8 * i, 8 * i + 7), (8 * i + 64, 8 * i + 71)) for i in range(8))

    def test_a_worker_with_gpus_on_both_sockets_gets_cores_of_both(self) -> None:
        owned = [tuple(DGX_GPUS)]
        assert bind("cores", owned, DGX, all_devices=DGX_GPUS).cpus == (run((0, 127)),)
        assert bind("numa", owned, DGX, all_devices=DGX_GPUS).cpus == (run((0, 127)),)

    @pytest.mark.parametrize("mode", ["cores", "exclusive"])
    def test_workers_that_share_a_gpu_have_cores_of_their_own(self, mode: str) -> None:
        owned = [(DGX_GPUS[i // 2],) for i in range(16)]
        cpus = bind(mode, owned, DGX, all_devices=DGX_GPUS).cpus
        assert cpus == tuple(run((4 * i, 4 * i + 3), (4 * i + 64, 4 * i + 67)) for i in range(16))

    def test_sixteen_workers_without_gpus_split_all_cores_in_order(self) -> None:
        cpus = cpu_only("cores", 16, DGX).cpus
        assert cpus == tuple(run((4 * i, 4 * i + 3), (4 * i + 64, 4 * i + 67)) for i in range(16))


class TestOneSocketWithoutGpus:
    FOUR = machine(cores=4, smt=2)  # 0,4 1,5 2,6 3,7

    def test_two_workers_have_two_whole_cores_each(self) -> None:
        assert cpu_only("cores", 2, self.FOUR) == Binding(cpus=((0, 1, 4, 5), (2, 3, 6, 7)))

    def test_what_is_left_over_goes_to_the_first_workers(self) -> None:
        assert cpu_only("cores", 3, self.FOUR).cpus == ((0, 1, 4, 5), (2, 6), (3, 7))

    def test_more_workers_than_cores_share_hardware_threads(self) -> None:
        assert cpu_only("cores", 6, self.FOUR).cpus == ((0, 4), (1, 5), (2,), (6,), (3,), (7,))
        assert cpu_only("cores", 8, self.FOUR).cpus == ((0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,))

    @pytest.mark.parametrize(
        ("mode", "flag", "hint"),
        [
            ("cores", "--cpu-bind cores", "--cpu-bind none"),
            ("exclusive", "--numa-binding exclusive", "leave --numa-binding out"),
        ],
    )
    def test_more_workers_than_hardware_threads_are_an_error(self, mode: str, flag: str, hint: str) -> None:
        with pytest.raises(LaunchError) as error:
            cpu_only(mode, 9, self.FOUR)
        assert error.value.message == f"{flag}: 9 workers need CPUs of their own, but the job may use only 8 CPUs"
        assert error.value.hint == hint

    @pytest.mark.parametrize("mode", ["numa", "node", "socket", "core-complex"])
    def test_one_node_is_for_everybody(self, mode: str) -> None:
        assert cpu_only(mode, 9, self.FOUR).cpus == (run((0, 7)),) * 9


class TestWorkersWithoutGpusOnSeveralNodes:
    def test_equal_shares_beat_staying_within_a_node(self) -> None:
        """The slowest worker of a job sets the pace of all."""
        assert cpu_only("cores", 3, machine(sockets=2, cores=8)).cpus == (run((0, 5)), run((6, 10)), run((11, 15)))

    def test_of_equal_shares_those_within_a_node_are_taken(self) -> None:
        cores = machine(sockets=2, cores=4, allowed=(0, 1, 4, 5, 6))
        assert cpu_only("cores", 2, cores).cpus == ((0, 1), (4, 5, 6))
        cores = machine(sockets=2, cores=4, allowed=(0, 1, 2, 4, 5, 6))
        assert cpu_only("cores", 4, cores).cpus == ((0, 1), (2,), (4, 5), (6,))

    def test_fewer_workers_than_nodes_get_several_nodes_of_their_own(self) -> None:
        assert cpu_only("cores", 2, machine(sockets=2, nodes=2, cores=4)).cpus == (run((0, 7)), run((8, 15)))

    def test_a_share_stays_on_one_cache_where_firmware_numbers_caches_in_turn(self) -> None:
        cores = [Core(cpus=(cpu,), numa_node=0, package=0, cache=cpu % 2) for cpu in range(8)]
        assert cpu_only("cores", 2, cores).cpus == ((0, 2, 4, 6), (1, 3, 5, 7))

    @pytest.mark.parametrize("mode", ["numa", "node"])
    def test_numa_spreads_them_in_blocks(self, mode: str) -> None:
        a, b = run((0, 7)), run((8, 15))
        assert cpu_only(mode, 4, machine(sockets=2, cores=8)).cpus == (a, a, b, b)
        assert cpu_only(mode, 3, machine(sockets=2, cores=8)).cpus == (a, a, b)

    def test_nodes_with_more_allowed_cpus_get_more_workers(self) -> None:
        cores = machine(sockets=2, cores=4, allowed=run((0, 3), (4, 5)))
        assert cpu_only("numa", 3, cores).cpus == (run((0, 3)), run((0, 3)), run((4, 5)))

    def test_socket_spreads_them_over_the_sockets(self) -> None:
        assert cpu_only("socket", 2, machine(sockets=2, nodes=2, cores=2)).cpus == (run((0, 3)), run((4, 7)))

    def test_socket_tells_sockets_apart_that_are_one_numa_node(self) -> None:
        cores = [Core(cpus=(cpu,), numa_node=0, package=cpu % 2, cache=cpu % 2) for cpu in range(4)]
        assert cpu_only("socket", 2, cores).cpus == ((0, 2), (1, 3))

    def test_core_complex_spreads_them_over_the_caches(self) -> None:
        cores = machine(sockets=2, cores=8, cache=4)
        assert cpu_only("core-complex", 2, cores).cpus == (run((0, 3)), run((8, 11)))

    def test_exclusive_is_cores(self) -> None:
        cores = machine(sockets=2, cores=8, smt=2)
        assert cpu_only("exclusive", 5, cores) == cpu_only("cores", 5, cores)

    def test_the_gpus_of_the_node_do_not_matter_to_a_job_for_the_cpus(self) -> None:
        assert bind("exclusive", [(), ()], DGX, all_devices=DGX_GPUS).cpus == (NEAR_0, NEAR_1)


class TestAsTorchrun:
    def test_exclusive_gives_the_lowest_gpus_one_core_more(self) -> None:
        devices = gpus(*[run((0, 7))] * 3)
        cpus = bind("exclusive", one_each(devices), machine(cores=8), all_devices=devices).cpus
        assert cpus == (run((0, 2)), run((3, 5)), run((6, 7)))

    def test_exclusive_gives_a_gpu_the_same_cores_whoever_else_runs(self) -> None:
        devices = gpus(*[run((0, 7))] * 3)
        assert bind("exclusive", [(devices[2],)], machine(cores=8), all_devices=devices).cpus == (run((6, 7)),)

    def test_socket_joins_the_nodes_of_the_gpus_socket(self) -> None:
        devices = gpus(run((4, 7)), run((8, 11)))
        cpus = bind("socket", one_each(devices), machine(sockets=2, nodes=2, cores=4), all_devices=devices).cpus
        assert cpus == (run((0, 7)), run((8, 15)))

    def test_larger_core_complexes_come_first_and_are_reused_in_turn(self) -> None:
        devices = gpus(*[run((0, 11))] * 4)
        cores = machine(cores=12, cache=4, allowed=run((1, 3), (4, 7), (8, 11)))
        cpus = bind("core-complex", one_each(devices), cores, all_devices=devices).cpus
        assert cpus == (run((4, 7)), run((8, 11)), run((1, 3)), run((4, 7)))

    def test_a_cache_of_several_nodes_counts_once_on_each(self) -> None:
        devices = gpus(run((0, 3)), run((4, 7)))
        cores = [Core(cpus=(cpu,), numa_node=cpu // 4, package=0, cache=0) for cpu in range(8)]
        assert bind("core-complex", one_each(devices), cores, all_devices=devices).cpus == (run((0, 3)), run((4, 7)))

    @pytest.mark.parametrize("near", [(), NEAR_0 + NEAR_1], ids=["no CPU is near", "every CPU is near"])
    def test_a_gpu_whose_node_is_not_known_counts_as_near_node_0(self, near: tuple[int, ...]) -> None:
        devices = gpus(NEAR_1, near)
        binding = bind("node", one_each(devices), DGX, all_devices=devices)
        assert binding.cpus == (NEAR_1, NEAR_0)
        assert binding.notes == ("which CPUs are near cuda:1 is not known: NUMA node 0 is used, as torchrun does",)

    def test_exclusive_cuts_in_the_order_of_cpu_numbers(self) -> None:
        devices = gpus(*[run((0, 3))] * 2)
        cores = [Core(cpus=(cpu,), numa_node=0, package=0, cache=cpu % 2) for cpu in range(4)]
        assert bind("exclusive", one_each(devices), cores, all_devices=devices).cpus == ((0, 1), (2, 3))

    @pytest.mark.parametrize(
        ("workers", "message"),
        [
            ([2], "cuda:2 gets 0 CPUs of those near it, too few for its 1 worker"),
            ([0, 0], "cuda:0 gets 1 CPU of those near it, too few for its 2 workers"),
        ],
    )
    def test_exclusive_fails_if_a_gpu_gets_too_few_cpus(self, workers: list[int], message: str) -> None:
        devices = gpus(*[run((0, 1))] * 3)
        with pytest.raises(LaunchError) as error:
            bind("exclusive", [(devices[i],) for i in workers], machine(cores=2), all_devices=devices)
        assert error.value.message == f"--numa-binding exclusive: {message}"
        assert error.value.hint == "--numa-binding node"

    def test_a_crowded_node_of_other_gpus_does_not_matter(self) -> None:
        devices = gpus(*[run((0, 1))] * 3, run((2, 3)))
        assert bind("exclusive", [(devices[3],)], machine(sockets=2, cores=2), all_devices=devices).cpus == ((2, 3),)


class TestExclusiveBeyondTorchrun:
    def test_a_worker_has_the_shares_of_all_its_gpus(self) -> None:
        owned = [(DGX_GPUS[0], DGX_GPUS[1]), (DGX_GPUS[2], DGX_GPUS[7])]
        cpus = bind("exclusive", owned, DGX, all_devices=DGX_GPUS).cpus
        assert cpus == (run((0, 15), (64, 79)), run((16, 23), (56, 63), (80, 87), (120, 127)))

    def test_a_gpu_without_allowed_cpus_counts_only_if_it_is_used(self) -> None:
        devices = gpus(run((0, 3)), run((4, 7)))
        cores = machine(sockets=2, cores=4, allowed=run((0, 3)))
        assert bind("exclusive", one_each(devices[:1]), cores, all_devices=devices).cpus == (run((0, 3)),)
        assert bind("exclusive", one_each(devices), cores, all_devices=devices).cpus == (run((0, 1)), run((2, 3)))

    def test_if_one_worker_has_no_gpu_all_are_bound_as_by_cores(self) -> None:
        devices = gpus(*[run((0, 7))] * 4)
        assert bind("exclusive", [(devices[0],), ()], machine(cores=8), all_devices=devices).cpus == (
            run((0, 3)),
            run((4, 7)),
        )


class TestACpusetOfSixCpus:
    """Eight GPUs on two sockets, but a scheduler gave us few of their CPUs."""

    def test_shares_are_cut_from_the_allowed_cpus_near_the_gpu(self) -> None:
        cores = machine(sockets=2, cores=32, smt=2, allowed=run((0, 1), (64, 65), (32, 33)))
        devices = [DGX_GPUS[0], DGX_GPUS[1], DGX_GPUS[4], DGX_GPUS[5]]
        assert bind("cores", one_each(devices), cores, all_devices=DGX_GPUS).cpus == ((0, 64), (1, 65), (32,), (33,))

    @pytest.mark.parametrize("mode", MODES)
    def test_if_no_cpu_near_any_gpu_is_allowed_the_allowed_ones_are_used_and_it_is_said(self, mode: str) -> None:
        cores = machine(sockets=2, cores=32, smt=2, allowed=run((32, 37)))
        devices = DGX_GPUS[:2]
        binding = bind(mode, one_each(devices), cores, all_devices=devices)
        halves = (run((32, 34)), run((35, 37)))
        assert binding.cpus == (halves if mode in ("cores", "exclusive") else (run((32, 37)),) * 2)
        assert binding.notes == ("no CPU near cuda:0, cuda:1 is among the 6 CPUs allowed here: others are used",)

    def test_a_gpu_without_allowed_cpus_gets_a_share_of_the_least_crowded_node(self) -> None:
        cores = machine(sockets=3, cores=4, allowed=run((0, 3), (4, 7)))
        devices = gpus(run((0, 3)), run((0, 3)), run((4, 7)), run((8, 11)))
        binding = bind("cores", one_each(devices), cores, all_devices=devices)
        assert binding.cpus == ((0, 1), (2, 3), (4, 5), (6, 7))
        assert binding.notes == ("no CPU near cuda:3 is among the 8 CPUs allowed here: others are used",)

    def test_a_node_with_fewer_cpus_than_workers_gives_way_to_an_even_split(self) -> None:
        cores = machine(sockets=2, cores=4, allowed=(3, 4, 5, 6, 7))
        devices = gpus(*[run((0, 3))] * 4)
        binding = bind("cores", one_each(devices), cores, all_devices=devices)
        assert binding.cpus == ((3,), (4, 5), (6,), (7,))
        assert binding.notes == (
            "4 workers share NUMA node 0, of which the job may use only 1 CPU: "
            "all allowed cores are divided evenly instead",
        )

    def test_fewer_cpus_than_workers_are_an_error(self) -> None:
        cores = machine(sockets=2, cores=32, allowed=run((29, 34)))
        with pytest.raises(LaunchError, match="8 workers need CPUs of their own, but the job may use only 6 CPUs"):
            bind("cores", one_each(DGX_GPUS), cores, all_devices=DGX_GPUS)


class TestAGpuOfANodeWithoutCpus:
    """Its list of near CPUs is empty, as if its node were not known."""

    def test_on_a_machine_with_one_node_for_cpus_nothing_needs_to_be_said(self) -> None:
        devices = gpus((), ())
        for mode in ("cores", "exclusive"):
            binding = bind(mode, one_each(devices), machine(cores=8), all_devices=devices)
            assert binding == Binding(cpus=(run((0, 3)), run((4, 7))))

    @pytest.mark.parametrize("mode", ["cores", "numa"])
    def test_on_other_machines_its_worker_is_placed_as_one_without_a_gpu(self, mode: str) -> None:
        devices = gpus((), ())
        binding = bind(mode, one_each(devices), machine(sockets=2, cores=4), all_devices=devices)
        assert binding.cpus == (run((0, 3)), run((4, 7)))
        assert binding.notes == ("which CPUs are near cuda:0, cuda:1 is not known: any of the allowed are used",)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    sockets, nodes, each = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 6))
    smt = draw(st.integers(1, 3))
    cpus = range(sockets * nodes * each * smt)
    whole = machine(sockets=sockets, nodes=nodes, cores=each, smt=smt)
    near = [
        tuple(cpu for core in whole if core.numa_node == node for cpu in core.cpus) for node in range(sockets * nodes)
    ]
    devices = gpus(*draw(st.lists(st.sampled_from([*near, (), tuple(cpus)]), max_size=8)))
    allowed = draw(st.sets(st.sampled_from(cpus), min_size=1))
    cores = machine(sockets=sockets, nodes=nodes, cores=each, smt=smt, cache=draw(st.integers(0, 3)), allowed=allowed)
    own = st.lists(st.sampled_from(devices), max_size=3, unique=True).map(tuple) if devices else st.just(())
    return cores, devices, draw(st.lists(own, min_size=1, max_size=10))


@given(jobs(), st.sampled_from(MODES))
def test_every_worker_gets_allowed_cpus_in_order(job: Job, mode: str) -> None:
    cores, devices, owned = job
    try:
        binding = bind(mode, owned, cores, all_devices=devices)
    except LaunchError:
        assert mode in ("cores", "exclusive")
        return
    allowed = {cpu for core in cores for cpu in core.cpus}
    assert len(binding.cpus) == len(owned)
    for cpus in binding.cpus:
        assert cpus
        assert set(cpus) <= allowed
        assert list(cpus) == sorted(set(cpus))


@given(jobs(), st.sampled_from(["cores", "exclusive"]))
def test_no_cpu_belongs_to_two_workers(job: Job, mode: str) -> None:
    cores, devices, owned = job
    try:
        binding = bind(mode, owned, cores, all_devices=devices)
    except LaunchError:
        return
    every = [cpu for cpus in binding.cpus for cpu in cpus]
    assert len(every) == len(set(every))


@given(jobs())
def test_cores_fails_only_if_there_are_fewer_cpus_than_workers(job):
    cores, devices, owned = job
    cpus = sum(len(core.cpus) for core in cores)
    try:
        bind("cores", owned, cores, all_devices=devices)
    except LaunchError as error:
        assert cpus < len(owned)
        assert f"{len(owned)} workers need" in str(error)
        assert f"only {cpus} CPU" in str(error)
    else:
        assert cpus >= len(owned)


@given(
    sockets=st.integers(1, 4),
    each=st.integers(1, 8),
    smt=st.integers(1, 2),
    workers=st.integers(1, 12),
    with_gpus=st.booleans(),
)
def test_shares_of_one_node_differ_by_one_core_at_most(sockets, each, smt, workers, with_gpus):
    cores = machine(sockets=sockets, cores=each, smt=smt)
    near = [tuple(cpu for core in cores if core.numa_node == node for cpu in core.cpus) for node in range(sockets)]
    devices = gpus(*(near[i % sockets] for i in range(workers)))
    try:
        cpus = bind("cores", one_each(devices) if with_gpus else [()] * workers, cores, all_devices=devices).cpus
    except LaunchError:
        return
    for group in [cpus[node::sockets] for node in range(sockets)] if with_gpus else [cpus]:
        sizes = [len(share) for share in group]
        assert not sizes or max(sizes) - min(sizes) <= smt
