"""Who may speak on the control channel: proofs of both sides, and signatures from then on."""

from __future__ import annotations

import json
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.reach.channel.handshake import (
    NOT_DDPLAUNCH,
    UNPROVEN,
    WRONG_KEY,
    Client,
    Decoder,
    Handshake,
    Refused,
    Reply,
    Server,
    Session,
    key,
)
from ddplaunch.system.loop.stream import FrameError

KEY = key("a long secret", "job-1")


def said(payload: bytes | None) -> bytes:
    assert payload is not None
    return payload


def refusal(side: Handshake, payload: bytes) -> Refused:
    with pytest.raises(Refused) as caught:
        side.receive(payload)
    return caught.value


def sessions(server: Server | None = None, client: Client | None = None) -> tuple[Session, Session]:
    server, client = server or Server(KEY), client or Client(KEY)
    answer = client.receive(said(server.opening))
    verdict = server.receive(said(answer.reply))
    end = client.receive(said(verdict.reply))
    assert verdict.session and end.session and end.reply is None
    return verdict.session, end.session


def frame(sealed: bytes) -> bytes:
    decoder = Decoder()
    decoder.trust()
    decoder.feed(sealed)
    return said(decoder.take())


def test_the_key_and_the_signatures_of_this_protocol_stay_as_they_are() -> None:
    """Another version of the same protocol has to come to the same bytes."""
    assert bytes(KEY).hex() == "c3cf4d293dd5e7678e407fd943e769e47b6a4c5ffc323f9c935bd5528b9037ae"
    sealed = "0000000568656c6c6f2f2c9fd797f8bf11584523c93b0186b3"
    session = Session(b"s" * 32, b"r" * 32)
    assert session.seal(b"hello").hex() == sealed
    assert session.seal(b"hello").hex() != sealed, "its number counts"


def test_both_sides_of_one_job_can_talk() -> None:
    server, client = sessions()
    for text in (b"one", b"", b"three"):
        assert client.open(frame(server.seal(text))) == text
        assert server.open(frame(client.seal(text))) == text


@pytest.mark.parametrize(
    "other",
    [key("another secret", "job-1"), key("a long secret", "job-2"), key(None, "job-1"), key("", "job-1")],
    ids=["wrong token", "other job", "no token", "empty token"],
)
def test_another_key_is_refused_and_both_sides_can_say_why(other) -> None:
    server, client = Server(KEY), Client(other)
    refused = refusal(server, said(client.receive(said(server.opening)).reply))
    assert refused.reason == WRONG_KEY
    assert refusal(client, said(refused.reply)).reason == WRONG_KEY


def test_without_a_token_the_name_of_the_job_is_the_secret() -> None:
    sessions(Server(key(None, "job-1")), Client(key(None, "job-1")))
    server = Server(key(None, "job-1"))
    assert refusal(server, said(Client(key(None, "job-2")).receive(said(server.opening)).reply)).reason == WRONG_KEY


def test_token_and_job_cannot_be_mixed_up() -> None:
    assert len({bytes(key("ab", "c")), bytes(key("a", "bc")), bytes(key("", "abc")), bytes(key(None, "abc"))}) == 4


def test_a_token_of_any_bytes_serves() -> None:
    sessions(Server(key("\udcff\x00", "é")), Client(key("\udcff\x00", "é")))


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1)], ids=["newer client", "newer server"])
def test_another_protocol_is_refused_by_either_side_in_its_own_words(here: int, there: int) -> None:
    server, client = Server(KEY, protocol=here), Client(KEY, protocol=there)
    by_client = refusal(client, said(server.opening))
    assert by_client.reason == f"protocol {here}, here {there}: install the same ddplaunch on all nodes"
    by_server = refusal(server, said(by_client.reply))
    assert by_server.reason == f"protocol {there}, here {here}: install the same ddplaunch on all nodes"


def test_a_later_protocol_may_say_more_and_is_still_understood_as_one() -> None:
    future = b'{"ddplaunch":7,"nonce":[[1]],"also":{"new":null}}'
    assert refusal(Client(KEY), future).reason.startswith("protocol 7, here 4")
    assert refusal(Server(KEY), future).reason.startswith("protocol 7, here 4")


def test_a_replayed_answer_is_refused() -> None:
    first = Server(KEY)
    answer = said(Client(KEY).receive(said(first.opening)).reply)
    assert first.receive(answer).session
    assert refusal(Server(KEY), answer).reason == WRONG_KEY


def test_a_replayed_verdict_is_refused() -> None:
    server, client, later = Server(KEY), Client(KEY), Client(KEY)
    verdict = said(server.receive(said(client.receive(said(server.opening)).reply)).reply)
    later.receive(said(server.opening))
    assert refusal(later, verdict).reason == UNPROVEN


def test_a_proof_sent_back_proves_nothing() -> None:
    """Somebody without the key answers with what he has just heard."""
    client = Client(KEY)
    answer = json.loads(said(client.receive(said(Server(KEY).opening)).reply))
    assert refusal(client, json.dumps({"proof": answer["proof"]}, separators=(",", ":")).encode()).reason == UNPROVEN
    server = Server(KEY)
    nonce = json.loads(said(server.opening))["nonce"]
    mirrored = json.dumps({"ddplaunch": 4, "nonce": nonce, "proof": answer["proof"]}, separators=(",", ":")).encode()
    assert refusal(server, mirrored).reason == WRONG_KEY


def test_an_empty_verdict_proves_nothing() -> None:
    client = Client(KEY)
    client.receive(said(Server(KEY).opening))
    assert refusal(client, b"{}").reason == UNPROVEN


@given(data=st.data(), which=st.sampled_from(["challenge", "answer", "verdict"]))
def test_no_byte_of_a_handshake_can_be_changed(data: st.DataObject, which: str) -> None:
    def altered(name: str, payload: bytes | None) -> bytes:
        payload = said(payload)
        if name != which:
            return payload
        at = data.draw(st.integers(0, len(payload) - 1))
        byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != payload[at]))
        return payload[:at] + bytes([byte]) + payload[at + 1 :]

    server, client = Server(KEY), Client(KEY)
    with pytest.raises(Refused):  # noqa: PT012 - which side refuses depends on the byte
        answer = client.receive(altered("challenge", server.opening))
        verdict = server.receive(altered("answer", answer.reply))
        client.receive(altered("verdict", verdict.reply))


HOSTILE = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"[" * 4096,
    b'{"a":' * 800,
    b'{"ddplaunch":4,"nonce":' + b"[" * 4000,
    b'{"ddplaunch":NaN}',
    b'{"ddplaunch":3e999}',
    b'{"ddplaunch":' + b"9" * 4000 + b"}",
    b'{"ddplaunch":-1}',
    b'{"ddplaunch":true}',
    b'{"ddplaunch":"1"}',
    b'{"ddplaunch":4.5}',
    b'{"ddplaunch":4}',
    b'{"ddplaunch":4,"nonce":"","proof":""}',
    b'{"ddplaunch":4,"nonce":"\xff\xfe","proof":"\xff"}',
    b'{"ddplaunch":4,"nonce":"\\ud800","proof":"\\ud800"}',
    b'{"ddplaunch":4,"nonce":"' + b64encode(bytes(33)) + b'","proof":"' + b64encode(bytes(32)) + b'"}',
    b'{"ddplaunch":4,"nonce":null,"proof":null}',
    b'{"refused":"\xff"}',
    b"\xff\xfe{\x00}\x00",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"SSH-2.0-OpenSSH_9.2\r\n",
]


@pytest.mark.parametrize("payload", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_payloads_are_refused_in_every_state(payload: bytes) -> None:
    assert refusal(Server(KEY), payload).reason == NOT_DDPLAUNCH
    assert refusal(Client(KEY), payload).reason == NOT_DDPLAUNCH
    client = Client(KEY)
    client.receive(said(Server(KEY).opening))
    assert refusal(client, payload).reason == NOT_DDPLAUNCH


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["ddplaunch", "nonce", "proof"]), inner)
    ),
)


@given(payload=st.binary(max_size=4096) | _json.map(lambda value: json.dumps(value).encode()))
def test_whatever_arrives_is_refused_or_nothing_worse(payload: bytes) -> None:
    waiting = Client(KEY)
    waiting.receive(said(Server(KEY).opening))
    for side in (Server(KEY), Client(KEY), waiting):
        assert refusal(side, payload).reason


def test_what_a_refusal_quotes_of_the_other_side_is_a_number() -> None:
    """A stranger's text must not reach anybody's terminal."""
    client = Client(KEY)
    client.receive(said(Server(KEY).opening))
    assert refusal(client, b'{"refused":"run this to repair it: ..."}').reason == NOT_DDPLAUNCH


def test_a_stranger_gets_no_more_than_a_number_used_once() -> None:
    first, second = (json.loads(said(Server(KEY).opening)) for _ in range(2))
    assert first.keys() == {"ddplaunch", "nonce"}
    assert first["nonce"] != second["nonce"]


# --- signatures


def test_a_frame_that_is_replayed_reordered_sent_back_or_of_another_connection_is_refused() -> None:
    (server, client), (other, _) = sessions(), sessions()
    replayed = frame(server.seal(b"stop"))
    assert client.open(replayed) == b"stop"
    _, reordered = server.seal(b"1"), frame(server.seal(b"2"))
    sent_back, of_another = frame(server.seal(b"1")), frame(other.seal(b"1"))
    for side, wrong in ((client, replayed), (client, reordered), (server, sent_back), (client, of_another)):
        with pytest.raises(FrameError, match=r"^sent a frame with a wrong signature$"):
            side.open(wrong)


@given(payload=st.binary(max_size=64), data=st.data())
def test_no_byte_of_a_frame_can_be_changed(payload: bytes, data: st.DataObject) -> None:
    server, client = sessions()
    sealed = bytearray(frame(server.seal(payload)))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        client.open(bytes(sealed))


@given(junk=st.binary(max_size=64))
def test_junk_has_no_signature(junk: bytes) -> None:
    _, client = sessions()
    with pytest.raises(FrameError):
        client.open(junk)


def test_nothing_shows_the_key() -> None:
    server, client = Server(KEY), Client(KEY)
    step = client.receive(said(server.opening))
    verdict = server.receive(said(step.reply))
    shown = "".join(
        f"{thing!r}{thing}"
        for thing in (KEY, server, client, step, verdict, verdict.session, Reply(session=verdict.session))
    )
    for secret in ("a long secret", bytes(KEY).hex(), bytes.__repr__(KEY)[2:-1], b64encode(KEY).decode()):
        assert secret not in shown
    assert str(KEY) == f"{KEY}" == repr(KEY) == "Key(...)"
