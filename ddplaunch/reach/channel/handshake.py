"""How two agents prove to each other that they know the key of the job, and the frames that they sign from then on.

Payloads in, payloads out: it opens no socket and knows no time. The listening side sends first, so that a client can tell
ddplaunch from another service, and an unauthenticated client gets no more than a nonce:

    server: {"ddplaunch": 3, "nonce": ...}
    client: {"ddplaunch": 3, "nonce": ..., "proof": ...}
    server: {"proof": ...}  or  {"refused": "key"}

A proof is a MAC with the job's key over the protocol's number, the role of the prover, and both nonces: neither a replay nor
a reflection of one is valid. The payload of each later frame is signed with a key of this connection and direction,
together with its number in the sequence. It refuses to encrypt: messages may be read on the network, but not altered.
"""

from __future__ import annotations

import hmac
import os
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Struct

from ddplaunch.system.loop import stream
from ddplaunch.system.loop.stream import FrameError

LIMIT_UNAUTHENTICATED = 4 << 10  # bytes of payload that an unauthenticated peer may send
LIMIT_UNKNOWN = 64 << 10  # bytes of payload that an authenticated peer may send before it takes part
LIMIT = 4 << 20  # bytes of payload that it may send then
SIGNATURE = 16  # bytes, of 32 that HMAC-SHA256 gives, which follow the payload

PROTOCOL = 4
NOT_DDPLAUNCH = "is not ddplaunch"
WRONG_KEY = "wrong token, or another job"
UNPROVEN = "does not know the token"

_HASH = "sha256"
_CLIENT = b"client"
_SERVER = b"server"
_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


def pack(payload: bytes, signature: bytes = b"") -> bytes:
    """Return a payload as a frame."""
    if len(payload) > LIMIT:
        raise ValueError(f"a payload of {len(payload)} bytes, and no peer takes more than {LIMIT}")
    return stream.pack(payload) + signature


class Decoder(stream.Decoder):
    """The receiving end of a stream. At first it takes what an unauthenticated peer may send: short, unsigned frames."""

    def __init__(self, limit: int = LIMIT_UNAUTHENTICATED) -> None:
        super().__init__(limit)

    def trust(self, limit: int = LIMIT) -> None:
        """Take, from the next frame on, what an authenticated peer may send: signed frames of up to so many bytes of payload."""
        self.limit, self.tail = limit, SIGNATURE


class Key(bytes):
    """The secret of all agents of a job; its repr does not show it."""

    def __repr__(self) -> str:
        return "Key(...)"

    __str__ = __repr__


def key(token: str | None, job: str) -> Key:
    """Make the job's key; without a token it follows from the job's name."""
    secret = b"no token" if token is None else b"token " + token.encode("utf-8", "surrogateescape")
    return Key(_mac(secret, _join(b"ddplaunch", job.encode("utf-8", "surrogateescape"))))


class Refused(Exception):
    """Why the other side is refused, as a predicate; `reply` is to be sent before closing."""

    def __init__(self, reason: str, reply: bytes | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.reply = reply


class Session:
    """Signs what one side sends, and checks what it receives, in order."""

    __slots__ = ("_frames_received", "_frames_sent", "_receive_mac", "_send_mac")

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_mac = hmac.new(send_key, digestmod=_HASH)  # copied for each frame, so that the key is hashed once
        self._receive_mac = hmac.new(receive_key, digestmod=_HASH)
        self._frames_sent = 0
        self._frames_received = 0

    def seal(self, payload: bytes) -> bytes:
        """Make the frame of the next payload to send."""
        signature = _signature(self._send_mac, self._frames_sent, payload)
        self._frames_sent += 1
        return pack(payload, signature)

    def open(self, frame: bytes) -> bytes:
        """Return the payload of the next frame as `Decoder.take` gave it.

        Raises FrameError: it was altered, replayed or reordered, or is from another sender.
        """
        payload = frame[:-SIGNATURE]
        if not hmac.compare_digest(_signature(self._receive_mac, self._frames_received, payload), frame[-SIGNATURE:]):
            raise FrameError("sent a frame with a wrong signature")
        self._frames_received += 1
        return payload


class Reply(Struct, frozen=True):
    """The result of a payload: one to send, and a session if the handshake is complete."""

    reply: bytes | None = None
    session: Session | None = None


class Server:
    """The listening side of one connection."""

    def __init__(self, key: Key, *, protocol: int = PROTOCOL) -> None:
        self._key = key
        self._protocol = protocol
        self._nonce = os.urandom(32)
        self.opening: bytes | None = _encode(_Challenge(ddplaunch=protocol, nonce=self._nonce))  # to be sent at once

    def receive(self, payload: bytes) -> Reply:
        """Check the client's answer. Raises Refused: the other side is not an agent of this job."""
        _check_version(payload, self._protocol)
        answer = _decode(_ANSWER, payload)
        proofs = _Proofs(self._key, self._protocol, self._nonce, answer.nonce)
        if not hmac.compare_digest(proofs.of(_CLIENT), answer.proof):
            raise Refused(WRONG_KEY, _encode(_Verdict(refused="key")))
        session = Session(send_key=proofs.session_key(_SERVER), receive_key=proofs.session_key(_CLIENT))
        return Reply(_encode(_Verdict(proof=proofs.of(_SERVER))), session)


class Client:
    """The connecting side of one connection."""

    def __init__(self, key: Key, *, protocol: int = PROTOCOL) -> None:
        self._key = key
        self._protocol = protocol
        self._nonce = os.urandom(32)
        self._proofs: _Proofs | None = None
        self.opening: bytes | None = None

    def receive(self, payload: bytes) -> Reply:
        """Check what the server sends, first its challenge, then its verdict.

        Raises Refused: the other side is not an agent of this job.
        """
        if self._proofs is None:
            return self._answer(payload)
        verdict = _decode(_VERDICT, payload)
        if verdict.refused is not None:
            raise Refused(WRONG_KEY)
        if verdict.proof is None or not hmac.compare_digest(self._proofs.of(_SERVER), verdict.proof):
            raise Refused(UNPROVEN)
        session_key = self._proofs.session_key
        return Reply(session=Session(send_key=session_key(_CLIENT), receive_key=session_key(_SERVER)))

    def _answer(self, payload: bytes) -> Reply:
        """Answer the server's challenge with the proof that this side knows the key."""
        try:
            _check_version(payload, self._protocol)
        except Refused as refused:
            if refused.reason != NOT_DDPLAUNCH:  # so that the other side can report it too
                refused.reply = _encode(_Version(ddplaunch=self._protocol))
            raise
        challenge = _decode(_CHALLENGE, payload)
        self._proofs = _Proofs(self._key, self._protocol, challenge.nonce, self._nonce)
        proof = self._proofs.of(_CLIENT)
        return Reply(_encode(_Answer(ddplaunch=self._protocol, nonce=self._nonce, proof=proof)))


Handshake = Server | Client


class _Proofs:
    """All that can be computed from the key and both nonces."""

    def __init__(self, key: Key, protocol: int, server_nonce: bytes, client_nonce: bytes) -> None:
        self._key = key
        self._shared = _join(b"%d" % protocol, server_nonce, client_nonce)

    def of(self, role: bytes) -> bytes:
        return _mac(self._key, _join(b"proof", role) + self._shared)

    def session_key(self, sender: bytes) -> bytes:
        return _mac(self._key, _join(b"session", sender) + self._shared)


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, _HASH)


def _signature(mac: hmac.HMAC, number: int, payload: bytes) -> bytes:
    """Return the signature of the frame of this number, by a MAC that has hashed the key and nothing else."""
    signing = mac.copy()
    signing.update(number.to_bytes(8))
    signing.update(payload)
    return signing.digest()[:SIGNATURE]


def _join(*parts: bytes) -> bytes:
    # with their lengths, so that no two lists of parts give the same bytes
    return b"".join([len(part).to_bytes(4) + part for part in parts])


class _Version(msgspec.Struct):
    """The part of each side's first payload that all future protocols keep."""

    ddplaunch: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class _Challenge(_Version):
    nonce: _Bytes32


class _Answer(_Version):
    nonce: _Bytes32
    proof: _Bytes32


class _Verdict(msgspec.Struct, omit_defaults=True):
    proof: _Bytes32 | None = None
    refused: Literal["key"] | None = None


_S = TypeVar("_S", bound=msgspec.Struct)

_VERSION = msgspec.json.Decoder(_Version)
_CHALLENGE = msgspec.json.Decoder(_Challenge)
_ANSWER = msgspec.json.Decoder(_Answer)
_VERDICT = msgspec.json.Decoder(_Verdict)
_encode = msgspec.json.Encoder().encode


def _parse(decoder: msgspec.json.Decoder[_S], payload: bytes) -> _S:
    try:
        return decoder.decode(payload)
    # RecursionError: nested too deeply; UnicodeDecodeError: text that is not UTF-8, which msgspec lets through
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise Refused(NOT_DDPLAUNCH) from None


def _decode(decoder: msgspec.json.Decoder[_S], payload: bytes) -> _S:
    """Take a payload only as this module writes it: with JSON's many spellings of one value, altered bytes could pass."""
    parsed = _parse(decoder, payload)
    if _encode(parsed) != payload:
        raise Refused(NOT_DDPLAUNCH)
    return parsed


def _check_version(payload: bytes, ours: int) -> None:
    theirs = _parse(_VERSION, payload).ddplaunch
    if theirs != ours:
        raise Refused(f"protocol {theirs}, here {ours}: install the same ddplaunch on all nodes")
