"""What fingerprints differ in, in words."""

from __future__ import annotations

from collections.abc import Iterable

from .exchange import Answers

#: Told to name a rank's machine; ranks may well run on several.
HOST = "host"
#: vLLM compares these caches itself and lets all ranks tune where one has none.
AUTOTUNE = "FlashInfer autotune cache"
_MISSING = "not reported"


def stopping_differences(answers: Answers) -> list[str]:
    """One sentence for each field that the ranks must have in common and do not."""
    return [_sentence(answers, field) for field in _differing(answers) if field != AUTOTUNE]


def harmless_differences(answers: Answers) -> list[str]:
    """The same for fields that vLLM copes with."""
    return [_sentence(answers, field) for field in _differing(answers) if field == AUTOTUNE]


def name_ranks(answers: Answers, ranks: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``; with their machines where there are several."""
    hosts = {rank: said.get(HOST) for rank, said in answers.fingerprints.items()}
    several = len(set(hosts.values())) > 1
    names = [
        f"{rank} ({hosts[rank]})" if several and hosts.get(rank) else str(rank) for rank in ranks
    ]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _differing(answers: Answers) -> list[str]:
    said = list(answers.fingerprints.values())
    fields = dict.fromkeys(field for one in said for field in one if field != HOST)
    return [field for field in fields if len({one.get(field) for one in said}) > 1]


def _sentence(answers: Answers, field: str) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, said in answers.fingerprints.items():
        by_value.setdefault(said.get(field, _MISSING), []).append(rank)
    values = "; ".join(
        f"{value} on {name_ranks(answers, ranks)}" for value, ranks in by_value.items()
    )
    return f"{field}: {values}."
