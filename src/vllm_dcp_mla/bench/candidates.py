"""Ways to cut our kernel's work that are worth measuring."""

from __future__ import annotations

from dataclasses import replace

from ..key_splits import Tiling

#: Small blocks of heads share keys through the L2 and leave few partial results each; blocks of 64
#: read keys once and use the wide matrix instructions.
#: Each is merged in both ways. Registers and shared memory of the blocks an SM that they name fit
#: SM90, but for some bytes of spills (ptxas, Triton 3.8).
CANDIDATES: tuple[Tiling, ...] = tuple(
    replace(tiling, merges_in_launch=merges)
    for tiling in (
        Tiling(),
        Tiling(keys=32, splits=64),
        Tiling(heads=32),
        Tiling(heads=32, keys=32, warps=4, blocks_per_sm=2, splits=64),
        Tiling(heads=16, warps=4, blocks_per_sm=2),
        Tiling(heads=16, blocks_per_sm=2),
        Tiling(heads=16, keys=32, warps=4, blocks_per_sm=3, splits=64),
    )
    for merges in (False, True)
)
