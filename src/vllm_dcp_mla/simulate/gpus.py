"""The GPUs that can be simulated."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        name: as on the command line.
        arch: compute capability.
        sms: multiprocessors.
        memory_bytes: memory of one GPU as CUDA reports it, to 0.1 GiB; a part of the same name may
            differ by some.
    """

    name: str
    arch: tuple[int, int]
    sms: int
    memory_bytes: int


GPUS = {
    gpu.name: gpu
    for gpu in (
        # What vllm-project/vllm#55879 logged: 6.15 GiB of graphs are 0.0345 of it.
        Gpu("b200", (10, 0), 148, round(178.35 * _GIB)),
        Gpu("b300", (10, 3), 148, round(267.7 * _GIB)),
        Gpu("h200", (9, 0), 132, round(139.8 * _GIB)),
        Gpu("h100", (9, 0), 132, round(79.1 * _GIB)),
    )
}
