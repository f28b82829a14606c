"""The backend classes that ``selftest`` runs: those of the GPU that is named."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..capability import FLASH_ATTN_3, FLASHINFER
from ..compat.releases import installed_release
from ..settings import KernelName
from ..simulate.gpus import GPUS


@dataclass(frozen=True, slots=True)
class Subject:
    """One of this package's backends.

    Attributes:
        member: vLLM's enum member.
        module: its module, below ``vllm_dcp_mla.backends``.
        cls: its class.
        kernel: the attention kernel, one that also runs without a GPU.
        quantizes_query: whether vLLM hands it queries of an fp8 cache's dtype.
    """

    member: str
    module: str
    cls: str
    kernel: KernelName
    quantizes_query: bool

    def backend(self) -> Any:
        """The class itself."""
        return getattr(import_module(f"vllm_dcp_mla.backends.{self.module}"), self.cls)


#: By major compute capability.
_SUBJECTS = {
    10: Subject(
        *(FLASHINFER, "trtllm", "DcpFlashInferMLASparseBackend", "reference"), quantizes_query=True
    ),
    9: Subject(
        *(FLASH_ATTN_3, "hopper", "DcpFlashAttnMLASparseBackend", "triton_decode"),
        quantizes_query=False,
    ),
}


def served() -> list[Subject]:
    """The subjects that exist beside the installed vLLM."""
    stays = installed_release().left_to_stock
    return [subject for subject in _SUBJECTS.values() if subject.member not in stays]


def subject_of(gpu: str) -> Subject:
    """The subject for a name of :data:`..simulate.gpus.GPUS`."""
    return _SUBJECTS[GPUS[gpu].arch[0]]
