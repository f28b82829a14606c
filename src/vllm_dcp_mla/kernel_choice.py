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
#: Triton 3.6) with 64 heads, in microseconds, some of 96 shapes:
#:
#: =====  ======  =============  ========  ===========
#: rows   tokens  triton_decode  flashmla  flash_attn3
#: =====  ======  =============  ========  ===========
#: 512    1       10.2           19.4      16.1
#: 512    16      21.1           21.6      21.7
#: 512    64      47.0           26.3      40.0
#: 512    1,024   377            215       222
#: 2,048  1       12.7           61.9      18.2
#: 2,048  16      40.1           66.1      32.1
#: 2,048  64      107            76.2      71.1
#: 2,048  128     170            95.5      102
#: 2,048  1,024   1,262          678       638
#: =====  ======  =============  ========  ===========
PREFERENCES: tuple[Preference, ...] = (
    Preference(256, 8, "triton_decode"),
    Preference(256, ANY, "flashmla"),
    Preference(512, 16, "triton_decode"),
    Preference(512, ANY, "flashmla"),
    Preference(1024, 8, "triton_decode"),
    Preference(1024, 32, "flash_attn3"),
    Preference(1024, 16, "triton_decode"),  # without flash_attn3
    Preference(1024, 512, "flashmla"),
    Preference(1024, ANY, "flash_attn3"),
    Preference(ANY, 4, "triton_decode"),
    Preference(ANY, 32, "flash_attn3"),
    Preference(ANY, 32, "triton_decode"),  # without flash_attn3
    Preference(ANY, 48, "flashmla"),
    Preference(ANY, 64, "flash_attn3"),
    Preference(ANY, 1024, "flashmla"),
    Preference(ANY, 8192, "flash_attn3"),
    Preference(ANY, ANY, "flashmla"),
    # Where what is above is not there.
    Preference(ANY, ANY, "flash_attn3"),
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
