"""What each supported series of vLLM has of its own, as data; nothing of vLLM is imported.

The rest of the package asks here, or the series' adapter (:mod:`.adapter`), and compares no
versions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

from .installed import installed_version


@dataclass(frozen=True, slots=True)
class Release:
    """A series of vLLM releases; each attribute is about stock's code.

    Attributes:
        minor: the series 0.``minor``.
        adapter: module beside this one with the hooks into it.
        takes_new_names: ``register_backend`` makes names of its own usable.
        left_to_stock: members of :data:`..plugin.OVERRIDES` that are not overridden there.
        gathers_pcp_with_dcp: sparse prefill under PCP with DCP gathers the ranks' KV shards.
        gathers_here: this package serves PCP with DCP on its own classes, which build on what the
            series tells an implementation of a step's prefills.
        interleaves: the indexer takes ``--cp-kv-cache-interleave-size`` above 1 under DCP.
        flashmla_takes_a2a: FLASHMLA_SPARSE takes ``--dcp-comm-backend a2a``.
        has_nvfp4_cache: ``--kv-cache-dtype nvfp4_ds_mla`` exists.
        defaults_to_fp8: GLM-5.x gets an ``fp8_e4m3`` cache on SM10x by default.
        masks_no_sequences: the mask of empty shards takes lengths of no sequence.
        autotunes_by_rank: each rank's FlashInfer autotune results have a file of their own.
    """

    minor: int
    adapter: str
    takes_new_names: bool
    left_to_stock: frozenset[str]
    gathers_pcp_with_dcp: bool
    gathers_here: bool
    interleaves: bool
    flashmla_takes_a2a: bool
    has_nvfp4_cache: bool
    defaults_to_fp8: bool
    masks_no_sequences: bool
    autotunes_by_rank: bool

    @property
    def series(self) -> str:
        """As people write it: ``0.33``."""
        return f"0.{self.minor}"


_0_33 = Release(
    minor=33,
    adapter="v0_33",
    takes_new_names=True,
    left_to_stock=frozenset(),
    gathers_pcp_with_dcp=True,
    gathers_here=True,
    interleaves=True,
    flashmla_takes_a2a=True,
    has_nvfp4_cache=True,
    defaults_to_fp8=True,
    masks_no_sequences=True,
    autotunes_by_rank=True,
)
_0_32 = replace(
    _0_33,
    minor=32,
    adapter="v0_30",
    # There is no FA4, and Hopper's class has no kernel call of its own to replace.
    left_to_stock=frozenset({"FLASH_ATTN_MLA_SPARSE_FA4", "FLASH_ATTN_MLA_SPARSE"}),
    gathers_here=False,
    flashmla_takes_a2a=False,
    autotunes_by_rank=False,
)
_0_31 = replace(_0_32, minor=31, takes_new_names=False, defaults_to_fp8=False)
_0_30 = replace(_0_31, minor=30)
_0_29 = replace(
    _0_30,
    minor=29,
    adapter="v0_29",
    gathers_pcp_with_dcp=False,
    interleaves=False,
    has_nvfp4_cache=False,
    masks_no_sequences=False,
)

#: Oldest first.
RELEASES = (_0_29, _0_30, _0_31, _0_32, _0_33)
NEWEST = RELEASES[-1]


def release_of(version: str | None) -> Release:
    """The series that a vLLM version is of; the nearest for one outside all, the newest for none.

    Args:
        version: as the distribution says it, None where vLLM is not installed.
    """
    if version is None:
        return NEWEST
    try:
        parsed = Version(version)
    except InvalidVersion:
        return NEWEST
    if parsed.major > 0:
        return NEWEST
    return min(RELEASES, key=lambda release: abs(release.minor - parsed.minor))


def installed_release() -> Release:
    """The series of the installed vLLM; the newest where there is none."""
    return release_of(installed_version("vllm"))
