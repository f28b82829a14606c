"""The vLLM releases that the package is tested with."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

TESTED = SpecifierSet(">=0.33.0,<0.34", prereleases=True)


def is_tested(vllm_version: str) -> bool:
    """Whether a vLLM release lies in the tested range."""
    return TESTED.contains(vllm_version)
