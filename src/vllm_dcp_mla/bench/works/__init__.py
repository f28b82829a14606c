"""The works of ``bench``, each a module with ``run(workbench)``, and what each needs: one list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..rows import Row
    from ..workbench import Workbench

#: Needs, as they are said where they are missing.
GPU = "an NVIDIA GPU"
SM90 = "a Hopper GPU (compute capability 9.0)"
NEWEST = "vLLM 0.33"


@dataclass(frozen=True, slots=True)
class Work:
    """One part of a benchmark.

    Attributes:
        name: what ``--work`` calls it; its module in this package has that name.
        title: one line for people.
        needs: of :data:`GPU`, :data:`SM90`, :data:`NEWEST`.
        silent_about: what its figures do not show, one sentence each.
        default: whether it runs unless others are named.
    """

    name: str
    title: str
    needs: tuple[str, ...] = ()
    silent_about: tuple[str, ...] = ()
    default: bool = True

    def runner(self) -> Callable[[Workbench], Iterator[Row]]:
        """Measures; imports what that takes."""
        run: Callable[[Workbench], Iterator[Row]] = import_module(f"{__name__}.{self.name}").run
        return run


def _work(
    name: str, title: str, *needs: str, silent: tuple[str, ...] = (), default: bool = True
) -> Work:
    return Work(name, title, needs, tuple(f"{name}: {said}" for said in silent), default)


_RANDOM_ROWS = (
    "tokens select rows at random; neighbours of a real prefill share rows, which the L2 then "
    "holds."
)
_OTHER_CACHE = (
    "stock serves DCP on Hopper from an fp8_ds_mla cache only, whose rows have 656 bytes; query "
    "gather and exchange between ranks are left out of both."
)
_ONE_REQUEST = (
    "tokens of one request, each of which selects keys at random; neighbours of a real prefill "
    "share keys."
)
_COUNTED = (
    "counted from calls, nothing ran on a B200; what FlashInfer launches inside its call, such as "
    "zeroing counters for a caller that brings none, is not seen."
)
_ONE_BUILDER = (
    "one rank's indexer builder by itself; input preparation and the attention builder, which is "
    "stock's, are not in it."
)

WORKS: dict[str, Work] = {
    work.name: work
    for work in (
        _work(
            "attention",
            "attention of one rank under DCP on Hopper, as the backend launches it",
            *(SM90, NEWEST),
            silent=(_RANDOM_ROWS, "trtllm-gen, the kernel of B200 and B300, does not run here."),
        ),
        _work(
            "step",
            "index conversion, kernel, LSE and merge preparation of one layer on Hopper",
            *(SM90, NEWEST),
            silent=(_OTHER_CACHE,),
        ),
        _work(
            "prefill",
            "the same step of a long prefill, its fp8 keys widened to bf16 first or not",
            *(SM90, NEWEST),
            silent=(_OTHER_CACHE, _ONE_REQUEST),
        ),
        _work(
            "launches",
            "launches and bytes of a step on SM100 around the kernel, counted",
            NEWEST,
            silent=(_COUNTED,),
        ),
        _work(
            "split",
            "one launch of a large step against several smaller ones",
            *(SM90, NEWEST),
            silent=("Hopper's kernels stand for trtllm-gen, whose launches serving splits.",),
        ),
        _work(
            "metadata",
            "metadata of the sparse indexer, host time and time on the GPU",
            NEWEST,
            silent=(_ONE_BUILDER,),
        ),
        _work(
            "startup",
            "kernels that are compiled before serving, and the plugin's import",
            NEWEST,
            silent=("loading weights and capturing CUDA graphs are not in it.",),
        ),
        _work(
            "growth",
            "how time grows with tokens, heads, local rows, ranks and context",
            *(SM90, NEWEST),
            silent=("eight GPUs are estimated on paper from one; no link was measured.",),
        ),
        _work(
            "tilings",
            "every way to cut our kernel's work, to choose from",
            *(SM90, NEWEST),
            default=False,
        ),
    )
}
