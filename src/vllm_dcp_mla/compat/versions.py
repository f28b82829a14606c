"""The vLLM releases that the package is tested with."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from .releases import RELEASES

TESTED = SpecifierSet(
    f">={RELEASES[0].series}.0,<0.{RELEASES[-1].minor + 1}",
    prereleases=True,
)


def is_tested(vllm_version: str) -> bool:
    """Whether a vLLM release lies in the tested range.

    Raises:
        packaging.version.InvalidVersion: it is no version.
    """
    return TESTED.contains(vllm_version)
