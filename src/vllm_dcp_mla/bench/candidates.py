"""Ways to cut our kernel's work that are worth measuring."""

from __future__ import annotations

from ..key_splits import Tiling

#: Small blocks of heads share keys through the L2 and leave few partial results each; blocks of 64
#: read keys once and use the wide matrix instructions. Registers and shared memory of the blocks an
#: SM that they name fit SM90, but for some bytes of spills (ptxas, Triton 3.8).
#:
#: Of fourteen these were the fastest of some shape on an H200; others were behind everywhere.
CANDIDATES: tuple[Tiling, ...] = (
    Tiling(),
    Tiling(merges_in_launch=True),
    Tiling(heads=32),
    Tiling(heads=16, blocks_per_sm=2),
    Tiling(heads=16, keys=32, warps=4, blocks_per_sm=3, splits=64),
    Tiling(heads=16, warps=4, blocks_per_sm=2, merges_in_launch=True),
)
