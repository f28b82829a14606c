"""The GPUs that can be simulated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: as on the command line.
        arch: compute capability.
        sms: multiprocessors.
        memory_bytes: memory of one GPU, as its driver reports it (rounded).
    """

    name: str
    arch: tuple[int, int]
    sms: int
    memory_bytes: int


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", (10, 0), 148, 180 << 30),
        Gpu("b300", (10, 3), 148, 268 << 30),
        Gpu("h200", (9, 0), 132, 140 << 30),
        Gpu("h100", (9, 0), 132, 79 << 30),
    )
}
