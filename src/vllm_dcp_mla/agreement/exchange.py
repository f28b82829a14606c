"""Ranks tell each other what they are, through a key-value store instead of a collective.

A collective waits for a rank that never comes, for as long as its group allows. A store can be
asked who has come. Standard library only: a store is anything that works like torch's.

The first rank that sees all others, or has waited long enough, decides for all by one atomic write.
Whoever comes later obeys it too: nobody goes on beside ranks that gave up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_POLL_S = 0.05
#: A rank that stops the engine stays for the others to read: it may hold the store.
_LINGER_S = 2.0
_DECISION = "decision"
_READERS = "readers"

Fingerprint = Mapping[str, str]


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Stores a value."""

    def get(self, key: str) -> bytes:
        """Reads a value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there; does not wait."""

    def add(self, key: str, value: int) -> int:
        """Adds to a counter and returns it."""

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Stores the desired value if the expected one is there, "" meaning none; returns it."""

    def delete_key(self, key: str) -> bool:
        """Removes a key."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What the ranks said.

    Attributes:
        absent: ranks that had not come when the first one stopped waiting, in order.
        fingerprints: those of the others.
    """

    absent: tuple[int, ...]
    fingerprints: dict[int, Fingerprint]


def publish(store: Store, rank: int, ranks: Sequence[int], own: Fingerprint, wait_s: float) -> None:
    """Says what this rank is, and waits until it is decided who has come.

    Args:
        store: holds the keys of this exchange and nothing else.
        rank: this rank, one of ``ranks``.
        ranks: all that take part, the same on each.
        own: what this rank is.
        wait_s: seconds from this call after which this rank stops waiting.
    """
    store.set(str(rank), json.dumps(dict(own)))
    deadline = time.monotonic() + wait_s
    while not store.check([_DECISION]):
        absent = [r for r in ranks if not store.check([str(r)])]
        if not absent or time.monotonic() >= deadline:
            store.compare_set(_DECISION, "", json.dumps(absent))
            return
        time.sleep(_POLL_S)


def collect(store: Store, ranks: Sequence[int]) -> Answers:
    """What the ranks said, once :func:`publish` has returned; the same on each of them."""
    absent = tuple(json.loads(store.get(_DECISION)))
    present = [rank for rank in ranks if rank not in absent]
    return Answers(absent, {rank: json.loads(store.get(str(rank))) for rank in present})


def leave(store: Store, rank: int, ranks: Sequence[int], answers: Answers, *, agreed: bool) -> None:
    """Ends this rank's part.

    Where all agreed, the last that leaves removes the keys. Where not, they stay for a rank that
    comes late, and the ranks that came wait a moment for each other.
    """
    if rank in answers.absent:
        return
    readers = store.add(_READERS, 1)
    if agreed:
        if readers == len(ranks):
            for key in (*map(str, ranks), _DECISION, _READERS):
                store.delete_key(key)
        return
    deadline = time.monotonic() + _LINGER_S
    while readers < len(answers.fingerprints) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        readers = store.add(_READERS, 0)
