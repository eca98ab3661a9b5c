"""Under which address the workers of several hosts meet, and over which interface they talk: each kind of network has a bed."""

import json

import pytest

HOSTS = ["node0", "node1"]


@pytest.fixture
def places(job, program):
    """Run place.py, one worker on each host, and give the variables that each of them got."""

    def places(address, *flags, **options):
        job.by_hand("--master-port", 29777, *flags, program("place"), address=address, **options)
        results = job.wait_each()
        assert {host: result.status for host, result in results.items()} == dict.fromkeys(job.bed.hosts, 0), results
        job.nothing_left()
        return [json.loads(sign)["variables"] for sign in job.signs("place", len(job.bed.hosts))]

    return places


@pytest.fixture
def train(job, program, light_torch):
    """Train over gloo, one worker on each host; it ends well only if all come together and have the same result."""

    def train(address, **options):
        job.put("go")
        job.by_hand(program("exact_training"), 3, address=address, **options)
        results = job.wait_each()
        assert {host: result.status for host, result in results.items()} == dict.fromkeys(job.bed.hosts, 0), results
        assert len(set(job.signs("weights", len(job.bed.hosts)))) == 1
        job.nothing_left()

    return train


def interfaces(variables):
    return {(place["GLOO_SOCKET_IFNAME"], place["NCCL_SOCKET_IFNAME"]) for place in variables}


class TestHostsWhoseOwnNameIsLoopback:
    """As on Debian, where each host's own name stands for 127.0.1.1 on that host."""

    @pytest.fixture(scope="class")
    @classmethod
    def three_hosts(cls, make_bed):
        return make_bed(HOSTS, own_name_on_loopback=True)

    def test_workers_talk_over_the_interface_that_leads_to_the_others(self, places):
        variables = places("node0")
        assert interfaces(variables) == {("eth0", "=eth0")}
        assert [place["MASTER_ADDR"] for place in variables] == ["node0", "node0"]

    def test_they_train(self, train):
        train("node0")

    def test_nobody_looks_for_the_first_node_where_its_own_name_leads(self, job, program):
        job.at_endpoint(program("place"), nnodes=2)
        results = job.wait_each()
        assert {result.status for result in results.values()} == {0}, results
        variables = [json.loads(sign)["variables"] for sign in job.signs("place", 2)]
        assert interfaces(variables) == {("eth0", "=eth0")}
        assert [place["GROUP_RANK"] for place in variables] == ["0", "1"]


class TestHostsWithoutIPv4:
    """Only the loopback interface has an IPv4 address."""

    @pytest.fixture(scope="class")
    @classmethod
    def three_hosts(cls, make_bed):
        return make_bed(HOSTS, names="6")

    @pytest.mark.parametrize("by", ["name", "address"])
    def test_the_address_stays_as_it_was_given(self, bed, places, by):
        address = "node0" if by == "name" else bed.address("node0")
        variables = places(address, "--init-method", "tcp")
        assert {place["MASTER_ADDR"] for place in variables} == {address}
        assert {place["DDPLAUNCH_INIT_METHOD"] for place in variables} == {
            "tcp://node0:29777" if by == "name" else "tcp://[fd77:1::10]:29777"
        }
        assert interfaces(variables) == {("eth0", "=eth0")}

    def test_they_train(self, bed, train):
        train(bed.address("node0"))

    def test_they_meet_at_an_endpoint_in_brackets(self, job, program):
        endpoint = f"[{job.bed.address('node0')}]:29400"
        job.start_each("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, program("place"))
        results = job.wait_each()
        assert {result.status for result in results.values()} == {0}, results
        variables = [json.loads(sign)["variables"] for sign in job.signs("place", 2)]
        assert {place["MASTER_ADDR"] for place in variables} == {job.bed.address("node0")}


class TestHostsWithBothFamilies:
    """Every name stands for an IPv4 and an IPv6 address."""

    @pytest.fixture(scope="class")
    @classmethod
    def three_hosts(cls, make_bed):
        return make_bed(HOSTS, names="both")

    @pytest.mark.parametrize("by", ["name", "4", "6"])
    def test_the_address_stays_as_it_was_given(self, bed, places, by):
        address = "node0" if by == "name" else bed.address("node0", family=by)
        variables = places(address)
        assert {place["MASTER_ADDR"] for place in variables} == {address}
        assert interfaces(variables) == {("eth0", "=eth0")}


class TestHostsWithTwoNetworks:
    """The first one, with the default route, does not lead to node 0."""

    @pytest.fixture(scope="class")
    @classmethod
    def three_hosts(cls, make_bed):
        return make_bed(HOSTS, networks=2)

    @pytest.mark.parametrize("by", ["name", "address"])
    def test_workers_talk_over_the_network_that_leads_to_node_0(self, bed, places, by):
        address = bed.name("node0", network=1) if by == "name" else bed.address("node0", network=1)
        variables = places(address)
        assert {place["MASTER_ADDR"] for place in variables} == {address}
        assert interfaces(variables) == {("eth1", "=eth1")}

    def test_the_first_network_is_taken_where_node_0_is_called_by_its_first_name(self, places):
        assert interfaces(places("node0")) == {("eth0", "=eth0")}

    def test_an_interface_that_the_user_names_stays(self, bed, places):
        chosen = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^lo"}
        variables = places(bed.name("node0", network=1), env=chosen)
        assert interfaces(variables) == {("eth0", "^lo")}

    def test_they_train_over_the_second_network_while_the_first_one_is_dead(self, bed, train):
        for host in HOSTS:
            bed.lag(host, 0, loss_percent=100, network=0)
        train(bed.name("node0", network=1))
