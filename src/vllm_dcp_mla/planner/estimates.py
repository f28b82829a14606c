"""What no formula gives: estimates with a range, and where each comes from.

The plan counts with ``bytes``; ``low`` and ``high`` say how far a start of vLLM may be from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .model_spec import ModelSpec
from .workload import Workload

GIB = 1 << 30
_BF16 = 2
_LOGITS_BYTES = 512 << 20  # VLLM_SPARSE_INDEXER_MAX_LOGITS_MB


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes and their range."""

    bytes: int
    low: int
    high: int

    @classmethod
    def exactly(cls, size: int) -> Estimate:
        """A figure that is known."""
        return cls(size, size, size)


#: CUDA context, NCCL, cuBLAS: made before vLLM measures free memory. The high end is what the
#: report of a failed autotuning leaves unexplained: 178.35 GiB * 0.08 - 7.6 GiB.
OUTSIDE = Estimate(int(2.5 * GIB), GIB, int(6.7 * GIB))
#: The high end was logged for GLM-5.2-NVFP4 at TP1 PCP4 DCP4 on B200.
GRAPHS = Estimate(int(6.15 * GIB), GIB // 2, int(6.15 * GIB))


def fused_moe_bytes(spec: ModelSpec, tokens: int, local_experts: int, *, fp4: bool = True) -> int:
    """Workspace of FlashInfer's CUTLASS fused MoE for a number of tokens.

    ``CutlassMoeFCRunner::getWorkspaceDeviceBufferSizes``: inputs and outputs of both products, each
    as large as the largest that shares its place, scales of fp4 inputs, and the routing tables. It
    gives 12.21 GiB for 65,536 tokens of GLM-5.2, where 12.22 was reported.
    """
    rows = tokens * spec.experts_per_token
    output = rows * spec.hidden_size * _BF16
    gated = rows * 2 * spec.moe_intermediate_size * _BF16
    scales = rows * max(spec.hidden_size, spec.moe_intermediate_size) // 16 if fp4 else 0
    return output + max(output, gated) + scales + 12 * rows + 4 * local_experts * tokens


def peak_bytes(spec: ModelSpec, w: Workload, tp: int, pcp: int, *, fp4: bool) -> Estimate:
    """What the profiling run holds for moments: the largest of MoE, indexer logits and sampling."""
    ranks = tp * pcp
    # ``MoERunner`` gathers the tokens of all PCP ranks.
    tokens = w.max_num_batched_tokens * pcp
    moe = 0
    if spec.routed_experts:
        moe = fused_moe_bytes(spec, tokens, -(-spec.routed_experts // ranks), fp4=fp4)
    streams = (3 * w.max_num_batched_tokens + tokens) * spec.hidden_size * _BF16
    sampled = min(w.max_num_seqs, w.max_num_batched_tokens) * spec.vocab_size * (3 * 4 + _BF16)
    largest = max(moe + streams, _LOGITS_BYTES + streams, sampled)
    return Estimate(largest, largest // 2, largest * 5 // 4)


def autotune_bytes(
    spec: ModelSpec, w: Workload, arch: tuple[int, int], tp: int, pcp: int, *, fp4: bool
) -> Estimate:
    """What FlashInfer's autotuning of the MoE asks for after the KV cache was made.

    Known for NVFP4 on SM10x, whose kernel is CUTLASS's; for other checkpoints the same is the most.
    """
    if not spec.routed_experts or arch[0] != 10:
        return Estimate.exactly(0)
    tokens, experts = w.max_num_batched_tokens * pcp, -(-spec.routed_experts // (tp * pcp))
    most = fused_moe_bytes(spec, tokens, experts, fp4=fp4)
    return Estimate.exactly(most) if fp4 else Estimate(most // 2, 0, most)
