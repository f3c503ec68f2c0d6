"""The handshake: both ends of a connection prove that they know the job's secret, before anything else is sent.

    rendezvous                                            rank
    greeting, a challenge  ─────────────────────────────▶
                           ◀─ challenge, rank, process, ─  the proof: an HMAC over all of it under the secret
    YES and a proof of its own, or NO  ─────────────────▶

The secret itself never travels, and challenges are drawn anew each time, so that nothing which was overheard is
of use later. Messages have fixed sizes: of a stranger that many bytes are read and none is interpreted.
"""

import hmac
import secrets
import socket
import struct
from typing import NamedTuple

from vpipe.communication.sockets import receive_exactly
from vpipe.errors import PeerError

MAGIC = b"vpipe rendezvous 1\n"
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


def greeting(challenge: bytes) -> bytes:
    return MAGIC + challenge


def check_proof(secret: bytes, challenge: bytes, introduction: bytes) -> tuple[Introduction, bytes] | None:
    """The caller, and the answer to it; None: it does not know the secret."""
    _, rank, process, proof = _INTRODUCTION.unpack(introduction)
    facts = challenge + introduction[: -len(proof)]
    if not hmac.compare_digest(proof, _proof(secret, b"rank", facts)):
        return None
    return Introduction(rank, process), YES + _proof(secret, b"rendezvous", facts)


def introduce(link: socket.socket, secret: bytes, me: Introduction, place: str) -> None:
    """The caller's side; raises if the other end is not this job's rendezvous."""
    greeted = receive_exactly(link, GREETING_BYTES)
    if not greeted.startswith(MAGIC):
        raise RefusedError(f"what answers at {place} is no rendezvous of vpipe: give the job another port")
    facts = greeted[len(MAGIC) :] + secrets.token_bytes(CHALLENGE) + struct.pack(">I16s", *me)
    link.sendall(facts[CHALLENGE:] + _proof(secret, b"rank", facts))
    answer = receive_exactly(link, _ANSWER_BYTES)
    if answer.startswith(NO):
        raise RefusedError(
            f"the rendezvous at {place} belongs to another job and turned rank {me.rank} away: "
            "give each job a port of its own, and all ranks of a job the same VPIPE_SECRET"
        )
    if not hmac.compare_digest(answer, YES + _proof(secret, b"rendezvous", facts)):
        raise RefusedError(f"what answers at {place} does not know this job's secret: nothing is sent to it")


def refusal() -> bytes:
    return NO.ljust(_ANSWER_BYTES)


def _proof(secret: bytes, role: bytes, facts: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + role + facts, "sha256")
