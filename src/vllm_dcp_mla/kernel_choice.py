"""Which attention kernel a launch on Hopper takes: arithmetic only, from what was measured."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from .key_splits import ANY, head_blocks


@dataclass(frozen=True, slots=True)
class Preference:
    """A kernel and the launches that it is for: those within both bounds.

    Attributes:
        rows: most keys that a token is expected to have.
        blocks: most tokens times blocks of 64 query heads, of which each kernel makes a thread
            block or several.
        kernel: its name.
    """

    rows: int
    blocks: int
    kernel: str


#: The first that holds, and whose kernel takes the shape, is taken. ``vllm-dcp-mla bench --work
#: attention`` measures all three and prints the table that follows. On an H200 (torch 2.11,
#: Triton 3.6) with 64 heads, in microseconds:
#:
#: =====  ======  =============  ========  ===========
#: rows   tokens  triton_decode  flashmla  flash_attn3
#: =====  ======  =============  ========  ===========
#: 512    1       10.9           23.4      19.6
#: 512    16      21.6           26.1      27.1
#: 512    128     54.8           46.8      59.9
#: 512    1,024   376            311       317
#: 2,048  1       13.4           65.9      22.3
#: 2,048  16      40.0           70.9      38.9
#: 2,048  128     168            106.8     115.2
#: 2,048  1,024   1,264          772       741
#: =====  ======  =============  ========  ===========
#:
#: Bounds between those are interpolated, and 128 heads are taken for twice the tokens: ours took
#: 30.8 and 62.8 us for 32 tokens, FlashMLA hardly more than for 16 up to 64. 1,024 rows, between
#: the two, and fewer than 512 were not measured.
PREFERENCES: tuple[Preference, ...] = (
    Preference(512, 24, "triton_decode"),
    Preference(512, ANY, "flashmla"),
    Preference(1024, 16, "triton_decode"),
    Preference(1024, 40, "flash_attn3"),
    Preference(1024, ANY, "flashmla"),
    Preference(ANY, 12, "triton_decode"),
    Preference(ANY, 64, "flash_attn3"),
    Preference(ANY, 512, "flashmla"),
    # Where what is above is not there, too.
    Preference(ANY, ANY, "flash_attn3"),
    Preference(ANY, ANY, "flashmla"),
    Preference(ANY, ANY, "triton_decode"),
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
        if rows > line.rows or line.kernel not in available:
            continue
        tokens = line.blocks if line.blocks == ANY else line.blocks // blocks
        most, last = found[-1] if found else (0, None)
        if tokens > most:
            if last == line.kernel:
                found.pop()
            found.append((tokens, line.kernel))
    return tuple(found)
