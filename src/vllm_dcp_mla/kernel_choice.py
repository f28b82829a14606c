"""Which attention kernel a launch on Hopper takes: arithmetic only, from what was measured."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from .key_splits import ANY, head_blocks


@dataclass(frozen=True, slots=True)
class Preference:
    """A kernel and the launches that it is for: those within all three bounds.

    Attributes:
        heads: most query heads.
        rows: most keys that a token is expected to have.
        blocks: most tokens times blocks of 64 query heads, of which each kernel makes a thread
            block or several.
        kernel: its name.
    """

    heads: int
    rows: int
    blocks: int
    kernel: str


#: Query heads up to which FlashMLA fills half of its tiles or less.
FEW_HEADS = 32

#: The first that holds, and whose kernel takes the shape, is taken. ``vllm-dcp-mla bench --work
#: attention`` measures all three and prints the table that follows.
PREFERENCES: tuple[Preference, ...] = (
    Preference(FEW_HEADS, ANY, 8, "triton_decode"),
    Preference(FEW_HEADS, ANY, ANY, "flash_attn3"),
    Preference(ANY, 256, 8, "triton_decode"),
    Preference(ANY, 256, ANY, "flashmla"),
    Preference(ANY, 512, 8, "triton_decode"),
    Preference(ANY, 512, ANY, "flashmla"),
    Preference(ANY, 1024, 2, "triton_decode"),
    Preference(ANY, 1024, 512, "flashmla"),
    Preference(ANY, 1024, 2, "triton_decode"),  # without flashmla
    Preference(ANY, 1024, ANY, "flash_attn3"),
    Preference(ANY, ANY, 1, "triton_decode"),
    Preference(ANY, ANY, 1024, "flashmla"),
    Preference(ANY, ANY, 4, "triton_decode"),  # without flashmla
    Preference(ANY, ANY, 8192, "flash_attn3"),
    Preference(ANY, ANY, ANY, "flashmla"),
    # Where what is above is not there.
    Preference(ANY, ANY, ANY, "flash_attn3"),
    Preference(ANY, ANY, ANY, "triton_decode"),
)


def kernels_by_tokens(
    num_heads: int, rows: int, available: Container[str]
) -> tuple[tuple[int, str], ...]:
    """The kernels of launches by their tokens, from shapes alone: a CUDA graph may hold any.

    Args:
        num_heads: query heads.
        rows: keys that a token is expected to have here.
        available: names of the kernels that take the shape; ``triton_decode`` among them.

    Returns:
        The most tokens that a kernel is for, rising, and its name; the last takes any number.
    """
    blocks = head_blocks(num_heads)
    found: list[tuple[int, str]] = []
    for line in PREFERENCES:
        if num_heads > line.heads or rows > line.rows or line.kernel not in available:
            continue
        tokens = line.blocks if line.blocks == ANY else line.blocks // blocks
        most, last = found[-1] if found else (0, None)
        if tokens > most:
            if last == line.kernel:
                found.pop()
            found.append((tokens, line.kernel))
    return tuple(found)
