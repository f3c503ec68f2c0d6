"""The job's rendezvous as torch.distributed knows it: what a process group is made with."""

from datetime import timedelta

import torch.distributed as dist

from vpipe.communication.rendezvous.client import RendezvousClient
from vpipe.errors import PeerError


class MeetingStore(dist.Store):
    """Keys and values over a meeting; bytes travel as Latin-1 text."""

    def __init__(self, meeting: RendezvousClient) -> None:
        super().__init__()
        self._meeting = meeting
        self._seconds = meeting.timeout

    def set(self, key: str, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self._meeting.tell("set", key, raw.decode("latin-1"))

    def get(self, key: str) -> bytes:
        try:
            return self._meeting.get(key, self._seconds).encode("latin-1")
        except PeerError as error:
            raise dist.DistStoreError(str(error)) from None

    def add(self, key: str, value: int) -> int:
        return int(self._meeting.tell("add", key, value))

    def check(self, keys: list[str]) -> bool:
        return all(self._meeting.tell("check", key) for key in keys)

    def deleteKey(self, key: str) -> bool:  # the name by which torch calls it
        return bool(self._meeting.tell("delete", key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        for key in keys:
            self._meeting.get(key, seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
