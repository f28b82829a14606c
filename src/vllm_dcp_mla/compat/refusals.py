"""Why a backend does not serve a deployment with a series of vLLM, where newer ones do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..capability import Deployment


def release_refusals(name: str, d: Deployment) -> list[str]:
    """Reasons that lie with the series; empty for the newest.

    Args:
        name: vLLM's enum member.
        d: a deployment with ``dcp > 1``.
    """
    release = d.libraries.release
    vllm = f"vLLM {release.series}"
    reasons = []
    if name in release.left_to_stock:
        reasons.append(f"{name} is not served with {vllm}")
    if d.pcp > 1 and not release.gathers_pcp_with_dcp:
        reasons.append(
            f"{vllm} merges the prefills of different PCP ranks as if they were one: PCP with DCP "
            "needs 0.30 or newer"
        )
    elif d.pcp > 1 and name != "FLASHMLA_SPARSE" and not release.gathers_here:
        reasons.append(f"{name} serves PCP with DCP with vLLM 0.33 only, got {release.series}")
    if d.interleave > 1 and not release.interleaves:
        reasons.append(
            f"the indexer of {vllm} takes --cp-kv-cache-interleave-size 1 only under DCP, got "
            f"{d.interleave}"
        )
    if name == "FLASHMLA_SPARSE":
        if d.pcp == 1 and d.comm != "ag_rs" and not release.flashmla_takes_a2a:
            reasons.append(
                f"FlashMLA of {vllm} takes --dcp-comm-backend ag_rs only under DCP, got {d.comm}"
            )
        if d.kv_cache_dtype == "nvfp4_ds_mla" and not release.has_nvfp4_cache:
            reasons.append(f"{vllm} has no nvfp4_ds_mla cache")
    return reasons
