"""What this package does, and the change of vLLM itself that makes it unnecessary.

The README's table and the log line about what is left to stock come from here. What depends on it
in the code asks :class:`.releases.Release`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .releases import RELEASES, Release

#: The pull request of vLLM that brought the fixes of 0.30.
_FIXES = "vllm-project/vllm#55879"


@dataclass(frozen=True, slots=True)
class Status:
    """One thing that this package does.

    Attributes:
        where: the file that does it, below the package.
        what: what it is, as the README says it.
        upstream: what vLLM does instead, or would have to do.
        since: minor number of the first series that does it; None: no release yet.
        left: what is left to stock from then on, for the log; empty where this package goes further
            and stays.
    """

    where: str
    what: str
    upstream: str
    since: int | None = None
    left: str = ""


STATUS = (
    Status(
        "device_buffer.py",
        "a workspace of bounded size that holds the LSE of any step, made while the model loads",
        f"sizes it by DCP and step since 0.30 ({_FIXES}); would have to split launches along "
        "tokens, and to reserve the buffer in `DeepseekV32Attention`",
    ),
    Status(
        "compat/empty_mask.py",
        "lengths of no sequence in the eager mask of empty shards",
        f"returns early ({_FIXES})",
        30,
        "the eager mask with lengths of no sequence",
    ),
    Status(
        "compat/a2a.py",
        "lengths of no sequence in the all-to-all's fused mask",
        "the same check in `_dcp_a2a_pack_send`",
    ),
    Status(
        "indexer/length_kernel.py",
        "a decode's bounds on a rank in one launch; with vLLM 0.29 stock's wait for the GPU, too",
        "one kernel for the operations of `_dcp_localize_decode_seq_lens`",
    ),
    Status(
        "indexer/hooks.py",
        "one variant of the chunk-metadata kernel",
        f"warms every variant ({_FIXES}); ours stays until it specialises on nothing that varies",
        30,
    ),
    Status(
        "indexer/builder.py",
        "prefill metadata without waits for the GPU, chunks by what a rank stores, a bounded "
        "exchange of candidates",
        "take a chunk's totals from the host's lengths; budget and bound it in "
        "`_split_indexer_prefill_chunks`",
    ),
    Status(
        "backends/gather.py",
        "PCP with DCP where stock's FlashMLA class does not serve it (vLLM 0.33; refused before)",
        f"refuses it on FLASHINFER_MLA_SPARSE since 0.30 ({_FIXES}); would have to gather the "
        "ranks' keys for prefill rows",
    ),
    Status(
        "backends/cached_rows.py",
        "under PCP with DCP, keys exchanged as they are cached, not rounded twice (vLLM 0.33)",
        "exchange what the cache holds, or float32, in `DeepseekV32Attention`",
    ),
    Status(
        "compat/dcp_order.py",
        "ranks numbered as their exchange goes where DCP spans TP and PCP (vLLM 0.33)",
        "make the group with `sort_ranks=False`, or sort its list",
    ),
    Status(
        "compat/pcp_drafts.py",
        "MTP with CUDA graphs under PCP with DCP: a drafter's first pass runs without (vLLM 0.33)",
        "hand the PCP manager to `SpeculatorCudaGraphManager.capture`, as to the target's",
    ),
    Status(
        "backends/flashmla.py",
        "constructor errors of FLASHMLA_SPARSE as reasons of selection",
        "check them in `supports_combination`",
    ),
    Status(
        "plugin.py",
        "a backend name of its own, in spawned processes too",
        "takes new names since 0.32; would have to load plugins before the configuration is "
        "unpickled, or pickle members by name",
    ),
    Status(
        "compat/flat_cache.py",
        "on Hopper, the kernel that finds cache rows warmed up for FLASH_ATTN_MLA_SPARSE",
        "name that backend in `MLAAttention._uses_flat_kv_cache`, or ask the backend",
    ),
    Status(
        "compat/sleep.py",
        "the workspace zeroed after sleep mode",
        "a hook for attention implementations after wake-up",
    ),
)


def left_to_stock(release: Release, status: Iterable[Status] = STATUS) -> list[str]:
    """What a series does itself and older supported ones do not, for the log."""
    return [
        line.left
        for line in status
        if line.left and line.since is not None and RELEASES[0].minor < line.since <= release.minor
    ]
