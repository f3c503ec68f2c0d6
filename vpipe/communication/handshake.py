"""The handshake: both ends of a connection prove that they know a key, before anything else is sent.

    listening end                                         caller
    greeting, a challenge  ─────────────────────────────▶
                           ◀─ challenge, rank, process, ─  the proof: an HMAC over all of it under the key
    YES and a proof of its own, or NO  ─────────────────▶

The key is the job's secret, or one that the ranks of the job have exchanged at the rendezvous. It never travels here,
and challenges are drawn anew each time, so that nothing which was overheard is of use later. Messages have fixed
sizes: of a stranger that many bytes are read and none is interpreted.
"""

import hmac
import secrets
import socket
import struct
from typing import NamedTuple

from vpipe.communication.sockets import receive_exactly
from vpipe.errors import PeerError
from vpipe.system.deadline import Deadline

MAGIC = b"vpipe handshake 2\n"
CHALLENGE = 32
GREETING_BYTES = len(MAGIC) + CHALLENGE
_INTRODUCTION = struct.Struct(f">{CHALLENGE}sI16s32s")  # challenge, rank, process, proof
INTRODUCTION_BYTES = _INTRODUCTION.size
YES, NO = b"YES\n", b"NO.\n"
_ANSWER_BYTES = len(YES) + 32


class Introduction(NamedTuple):
    """The caller; `process` distinguishes two processes that claim to be the same rank."""

    rank: int
    process: bytes


class RefusedError(PeerError):
    """The other end does not know this job's secret, or answers that we do not."""


class NoHandshakeError(RefusedError):
    """The other end is no part of vpipe."""


class TurnedAwayError(RefusedError):
    """The other end answers that this process does not belong there."""


class ImpostorError(RefusedError):
    """The other end does not know the key."""


def greeting(challenge: bytes) -> bytes:
    return MAGIC + challenge


def check_proof(key: bytes, challenge: bytes, introduction: bytes) -> tuple[Introduction, bytes] | None:
    """The caller, and the answer to it; None: it does not know the key."""
    _, rank, process, proof = _INTRODUCTION.unpack(introduction)
    facts = challenge + introduction[: -len(proof)]
    if not hmac.compare_digest(proof, _proof(key, b"caller", facts)):
        return None
    return Introduction(rank, process), YES + _proof(key, b"listener", facts)


def introduce(link: socket.socket, key: bytes, me: Introduction, deadline: Deadline) -> None:
    """The caller's side; raises if the other end does not know the key, or turns this process away."""
    greeted = receive_exactly(link, GREETING_BYTES, deadline)
    if not greeted.startswith(MAGIC):
        raise NoHandshakeError("is no socket of vpipe")
    facts = greeted[len(MAGIC) :] + secrets.token_bytes(CHALLENGE) + struct.pack(">I16s", *me)
    link.sendall(facts[CHALLENGE:] + _proof(key, b"caller", facts))
    answer = receive_exactly(link, _ANSWER_BYTES, deadline)
    if answer.startswith(NO):
        raise TurnedAwayError(f"turned rank {me.rank} away")
    if not hmac.compare_digest(answer, YES + _proof(key, b"listener", facts)):
        raise ImpostorError("does not know the key")


def refusal() -> bytes:
    return NO.ljust(_ANSWER_BYTES)


def _proof(key: bytes, role: bytes, facts: bytes) -> bytes:
    return hmac.digest(key, MAGIC + role + facts, "sha256")
