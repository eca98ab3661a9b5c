"""The members of a job, which are never changed: against plain dictionaries, which are."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddplaunch.launcher.decide.job.members import FrozenMap, Member, Members

KEYS = st.one_of(st.integers(0, 3), st.integers(120, 135), st.integers(0, 20_000))  # within a part, at its border, far


@given(st.dictionaries(KEYS, st.integers()), st.lists(st.tuples(KEYS, st.none() | st.integers())))
def test_a_frozen_map_is_a_dict_that_does_not_change(first, steps):
    taken = [(FrozenMap.of(first), first)]
    for key, value in steps:
        frozen, plain = taken[-1]
        if value is not None:
            taken.append((frozen.with_item(key, value), {**plain, key: value}))
        elif key in plain:
            taken.append((frozen.without(key), {other: plain[other] for other in plain if other != key}))
    for frozen, plain in taken:
        assert dict(frozen) == plain
        assert len(frozen) == len(plain)
        assert list(frozen.values()) == [plain[key] for key in frozen]
        assert all((key in frozen) == (key in plain) for key, _ in steps)


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 3, 127, 128]), st.sampled_from(["joins", "takes part", "ends", "goes"])))
)
def test_members_know_who_has_which_place_and_whether_all_have_ended(steps: list[tuple[int, str]]) -> None:
    members, plain = Members.of(()), dict[int, Member]()
    for id, what in steps:
        if what == "joins" and id not in plain:
            # every third is given no place; the coordinator's own agent has the first without asking
            wanted = None if id % 3 == 0 else id
            plain[id] = Member(id=id, host=f"host{id}", workers=1, requested_rank=wanted)
            members = members.with_member(plain[id])
        elif what == "goes" and id in plain:
            del plain[id]
            members = members.without(id)
        elif id in plain:
            plain[id] = replace(plain[id], node_rank=id, has_ended=what == "ends")
            members = members.with_member(plain[id])
        assert members == plain == Members.of(plain.values())
        assert members.all_have_ended == all(member.node_rank is None or member.has_ended for member in plain.values())
        assert members.all_have_ended == Members.of(plain.values()).all_have_ended
        for place in (0, 1, 2, 3, 127, 128):
            has_place = place == 0 or place % 3
            assert members.holder_of_rank(place) == (plain.get(place) if has_place else None)
