"""Bytes of the trtllm-gen workspace, and how many tokens one launch may take: arithmetic only.

FlashInfer's launcher (``csrc/trtllm_fmha_kernel_launcher.cu``, 0.6.14 to 0.7.2.post1) carves, when
the log-sum-exp (LSE) is asked for, an upper bound of the softmax statistics off the front of the
workspace, and hands what is left to the kernel as scratch, unchecked:

    sizeof(float2) * heads * batch * round_up(q_len, 256) + 1 MiB  |  scratch ...

vLLM passes each token as a batch entry of ``q_len`` 1, so a token costs ``2048 * heads`` bytes.
Token rows are independent of each other: a batch split along tokens gives the same numbers from a
workspace that no longer grows with it.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
STATS_BYTES_PER_SLOT = 8  # sizeof(float2)
STATS_SLOT_ROUNDING = 256  # the launcher rounds q_len up to this
STATS_GUARD_BYTES = MIB

#: vLLM's default of VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE; kept as scratch beside the slab.
DEFAULT_SCRATCH_BYTES = 394 * MIB
#: 4,096 tokens at 64 heads, 2,048 at 128. Cut so, 8,192 and 32,768 tokens of 64 heads took 0.98 to
#: 1.04 of one launch's time in two runs of ``bench --work split`` on an H200, 1.01 in the mean, by
#: FlashMLA's and the Triton kernel (FlashAttention's, which such steps do not take: 0.95 to 1.06);
#: cut into 1,024, 1.00 to 1.10. The times of one cut spread by up to 7 % in one run and 13 % in the
#: other. On SM100, whose launches it limits, nothing was timed.
DEFAULT_SLAB_LIMIT_BYTES = 537_919_488
#: Scratch left in any case. Rows are split over thread blocks only while all blocks fit on the
#: multiprocessors (``fmhaKernels.cuh``), so that partial results take at most
#: SMs * rows a block * (512 * 2 + 8) bytes (``kernelParams.h``): 160 SMs, 256 rows: 40.3 MiB.
MIN_SCRATCH_BYTES = 64 * MIB


def softmax_stats_bytes(num_heads: int, num_tokens: int, q_len: int = 1) -> int:
    """Bytes that trtllm-gen carves for softmax statistics when the LSE is asked for.

    Args:
        num_heads: query heads of the launch (gathered heads under DCP).
        num_tokens: batch entries of the launch.
        q_len: query tokens a batch entry.

    Raises:
        ValueError: a count is below 1.
    """
    for name, value in (("num_heads", num_heads), ("num_tokens", num_tokens), ("q_len", q_len)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    slots = -(-q_len // STATS_SLOT_ROUNDING) * STATS_SLOT_ROUNDING
    return STATS_BYTES_PER_SLOT * num_heads * num_tokens * slots + STATS_GUARD_BYTES


def stock_workspace_bytes(heads_per_rank: int, dcp: int, max_num_batched_tokens: int) -> int:
    """Bytes that stock vLLM 0.30 to 0.33 allocates for the same kernel.

    Stock multiplies the rank's heads by ``dcp`` whatever the topology, which is four times too much
    where a DCP group equals a PCP group of 4. Without DCP no LSE is asked for: the default stays.
    """
    if dcp <= 1:
        return DEFAULT_SCRATCH_BYTES
    return DEFAULT_SCRATCH_BYTES + softmax_stats_bytes(heads_per_rank * dcp, max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class WorkspacePlan:
    """How launches of ``num_heads`` heads use one workspace.

    Attributes:
        num_heads: query heads of every launch.
        tokens_per_launch: most tokens one launch takes; at least 1.
        slab_bytes: what the launcher carves for that many tokens.
        total_bytes: the whole workspace, slab and scratch.
    """

    num_heads: int
    tokens_per_launch: int
    slab_bytes: int
    total_bytes: int

    def num_launches(self, num_tokens: int) -> int:
        """Launches that ``num_tokens`` tokens take; 0 for no tokens."""
        return -(-num_tokens // self.tokens_per_launch)

    def counter_bytes(self, num_sms: int) -> int:
        """Bytes of counters that suffice for any launch whose slab fits this workspace."""
        slab_space = self.total_bytes - MIN_SCRATCH_BYTES - STATS_GUARD_BYTES
        head_tokens = slab_space // (STATS_BYTES_PER_SLOT * STATS_SLOT_ROUNDING)
        return counter_bytes(1, head_tokens, num_sms)

    def launches(self, num_tokens: int) -> list[slice]:
        """Token rows of each launch, in order, without gaps or overlap."""
        step = self.tokens_per_launch
        return [slice(i, min(i + step, num_tokens)) for i in range(0, num_tokens, step)]


def plan_workspace(
    num_heads: int,
    max_num_tokens: int,
    *,
    slab_limit_bytes: int = DEFAULT_SLAB_LIMIT_BYTES,
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
    workspace_bytes: int | None = None,
) -> WorkspacePlan:
    """Plans launches so that slab and scratch always fit.

    Args:
        num_heads: query heads the kernel really sees, see :func:`..topology.gathered_heads`.
        max_num_tokens: most tokens of a step (``--max-num-batched-tokens``); no slab is planned for
            more.
        slab_limit_bytes: most bytes of the slab.
        scratch_bytes: bytes beside the slab.
        workspace_bytes: a size that is given: an existing buffer, or the user's
            ``VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE``. It is neither exceeded nor shrunk: launches
            become smaller until the slab and at least 64 MiB of scratch fit.

    Raises:
        ValueError: a count below 1, or a size that does not hold a single token; the message names
            the bytes that one token needs.
    """
    one_token = softmax_stats_bytes(num_heads, 1)  # refuses num_heads below 1
    if max_num_tokens < 1:
        raise ValueError(f"max_num_tokens must be at least 1, got {max_num_tokens}")
    if slab_limit_bytes < one_token:
        raise ValueError(
            f"slab_limit_bytes is {slab_limit_bytes}, but one token of {num_heads} heads needs "
            f"{one_token} bytes; raise slab_limit_bytes (VLLM_DCP_MLA_SLAB_LIMIT_BYTES)."
        )
    slab_space = slab_limit_bytes
    if workspace_bytes is not None:
        needed = MIN_SCRATCH_BYTES + one_token
        if workspace_bytes < needed:
            raise ValueError(
                f"A workspace of {workspace_bytes} bytes does not hold one token of {num_heads} "
                f"heads: {needed} bytes are needed ({MIN_SCRATCH_BYTES} of scratch, {one_token} of "
                f"softmax statistics); raise or unset VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE."
            )
        slab_space = min(slab_space, workspace_bytes - MIN_SCRATCH_BYTES)
    bytes_per_token = one_token - STATS_GUARD_BYTES
    tokens = min(max_num_tokens, (slab_space - STATS_GUARD_BYTES) // bytes_per_token)
    slab = softmax_stats_bytes(num_heads, tokens)
    total = workspace_bytes if workspace_bytes is not None else slab + scratch_bytes
    return WorkspacePlan(num_heads, tokens, slab, total)


def counter_bytes(num_heads: int, num_tokens: int, num_sms: int) -> int:
    """Bytes of the semaphores that a trtllm-gen launch counts its split rows with.

    ``round_up(max(tokens * heads, SMs), 8) * 4``, FlashInfer 0.6.18 and newer (older ones keep the
    counters inside the workspace's scratch).
    """
    return -(-max(num_heads * num_tokens, num_sms) // 8) * 8 * 4
