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
#: attention`` measures all three and prints the table that follows. On an H200 (torch 2.11,
#: Triton 3.6), in microseconds, some of 144 shapes:
#:
#: =====  =====  ======  =============  ========  ===========
#: heads  rows   tokens  triton_decode  flashmla  flash_attn3
#: =====  =====  ======  =============  ========  ===========
#: 32     512    8       11.9           23.3      16.8
#: 32     512    64      38.7           64.7      30.8
#: 64     512    1       10.2           12.8      16.0
#: 64     512    8       14.8           14.5      19.8
#: 64     512    16      21.0           17.0      21.7
#: 64     512    64      46.8           26.2      39.7
#: 64     512    1,024   386            215       224
#: 64     2,048  1       12.7           15.5      18.3
#: 64     2,048  8       27.5           22.5      26.3
#: 64     2,048  16      40.8           30.2      32.8
#: 64     2,048  64      108            69.1      70.4
#: 64     2,048  1,024   1,324          680       684
#: =====  =====  ======  =============  ========  ===========
#:
#: From 1,024 tokens of 2,048 rows on the libraries' order varies from run to run, by up to 9 %.
PREFERENCES: tuple[Preference, ...] = (
    Preference(FEW_HEADS, 512, 32, "triton_decode"),
    Preference(FEW_HEADS, ANY, 16, "triton_decode"),
    Preference(FEW_HEADS, ANY, ANY, "flash_attn3"),
    Preference(FEW_HEADS, ANY, 64, "triton_decode"),
    Preference(ANY, 512, 8, "triton_decode"),
    Preference(ANY, 1024, 4, "triton_decode"),
    Preference(ANY, ANY, 1, "triton_decode"),
    Preference(ANY, ANY, ANY, "flashmla"),
    # Where what is above is not there.
    Preference(ANY, ANY, 4, "triton_decode"),
    Preference(ANY, ANY, ANY, "flash_attn3"),
    Preference(ANY, ANY, ANY, "triton_decode"),
)

#: Query tokens from which a library that is there takes a launch, and its keys are not split.
MANY_TOKENS = 128
#: Keys that tokens must attend for each row that is widened, and for the launches. On an H200 a row
#: takes 0.6 ns and the launches 6 us, and a key is attended 0.5 to 0.7 ns sooner at 16, 32 and 64
#: heads (``vllm-dcp-mla bench --work prefill``).
_KEYS_PER_ROW = 1
_KEYS_PER_STEP = 1 << 14


def widens(tokens: int, keys: int, rows: int) -> bool:
    """Whether a prefill from an fp8 cache widens its rows to bf16 first, from host lengths alone.

    Args:
        tokens: query tokens.
        keys: that they attend here, all together, about.
        rows: rows of the cache that they attend some of.
    """
    return tokens >= MANY_TOKENS and keys >= _KEYS_PER_ROW * rows + _KEYS_PER_STEP


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
