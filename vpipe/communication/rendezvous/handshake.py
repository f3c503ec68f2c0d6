"""The handshake: both ends of a connection prove that they know the job's secret, before anything else is said.

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

from vpipe.errors import PeerError

MAGIC = b"vpipe rendezvous 1\n"
CHALLENGE = 32
GREETING_BYTES = len(MAGIC) + CHALLENGE
_INTRODUCTION = struct.Struct(f">{CHALLENGE}sI16s32s")  # challenge, rank, process, proof
INTRODUCTION_BYTES = _INTRODUCTION.size
YES, NO = b"YES\n", b"NO.\n"
_VERDICT_BYTES = len(YES) + 32


class Introduction(NamedTuple):
    """Who called; `process` tells two processes apart that claim to be the same rank."""

    rank: int
    process: bytes


class RefusedError(PeerError):
    """The other end does not know this job's secret, or says that we do not."""


def greeting(challenge: bytes) -> bytes:
    return MAGIC + challenge


def judge(secret: bytes, challenge: bytes, said: bytes) -> tuple[Introduction, bytes] | None:
    """Who is calling, and what to answer; None: it does not know the secret."""
    _, rank, process, proof = _INTRODUCTION.unpack(said)
    facts = challenge + said[: -len(proof)]
    if not hmac.compare_digest(proof, _proof(secret, b"rank", facts)):
        return None
    return Introduction(rank, process), YES + _proof(secret, b"rendezvous", facts)


def introduce(link: socket.socket, secret: bytes, me: Introduction, place: str) -> None:
    """The caller's side; raises if the other end is not this job's rendezvous."""
    greeted = _exactly(link, GREETING_BYTES)
    if not greeted.startswith(MAGIC):
        raise RefusedError(f"what answers at {place} is no rendezvous of vpipe: give the job another port")
    facts = greeted[len(MAGIC) :] + secrets.token_bytes(CHALLENGE) + struct.pack(">I16s", *me)
    link.sendall(facts[CHALLENGE:] + _proof(secret, b"rank", facts))
    verdict = _exactly(link, _VERDICT_BYTES)
    if verdict.startswith(NO):
        raise RefusedError(
            f"the rendezvous at {place} belongs to another job and turned rank {me.rank} away: "
            "give each job a port of its own, and all ranks of a job the same VPIPE_SECRET"
        )
    if not hmac.compare_digest(verdict, YES + _proof(secret, b"rendezvous", facts)):
        raise RefusedError(f"what answers at {place} does not know this job's secret: it is told nothing")


def refusal() -> bytes:
    return NO.ljust(_VERDICT_BYTES)


def _proof(secret: bytes, role: bytes, facts: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + role + facts, "sha256")


def _exactly(link: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count:
        more = link.recv(count - len(said))
        if not more:
            raise ConnectionResetError("the connection was closed")
        said += more
    return said
