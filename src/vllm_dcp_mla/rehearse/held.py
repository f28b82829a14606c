"""What a rank holds of each line of a plan, read off vLLM's live objects.

Nothing of this is an interface of vLLM: every reader names the file below ``vllm/`` (0.33) whose
attributes it reads. One that does not find them says so instead of a figure.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: Modules whose requests the plan's line of the shared workspace is about, by their last names.
GATHERING = ("sparse_attn_indexer", "flashmla_sparse")
_ALIGNMENT = 256  # of each tensor in the shared workspace
_ROPE = "cos_sin_cache"
#: What missing or other attributes raise, and torch where a tensor has no storage.
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, RuntimeError, ImportError)


class NotReadError(ValueError):
    """A figure that is not what it is taken for; the message says why."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Where the readers look.

    Attributes:
        runner: vLLM's model runner.
        layers: attention and cache layers by name (``static_forward_context``).
        requests: as :func:`watch_workspace` gave them.
    """

    runner: Any
    layers: Mapping[str, Any]
    requests: Mapping[str, int]


def watch_workspace() -> dict[str, int]:
    """Notes from now on the most bytes that each module asks the shared workspace for at once.

    The workspace is as large as the largest request, whoever made it: what it holds does not tell
    the indexer's part (``v1/worker/workspace.py``).
    """
    from vllm.v1.worker.workspace import WorkspaceManager

    stock = WorkspaceManager.get_simultaneous
    largest: dict[str, int] = {}

    def noted(manager: Any, *wanted: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in wanted)
        size = sum(-(-each // _ALIGNMENT) * _ALIGNMENT for each in sizes)
        largest[caller] = max(size, largest.get(caller, 0))
        return stock(manager, *wanted)

    WorkspaceManager.get_simultaneous = noted
    return largest


def read(llm: Any, requests: Mapping[str, int]) -> dict[str, Any]:
    """Bytes by line, why others were not read, and this rank's GPU.

    Args:
        llm: a running ``vllm.LLM``.
        requests: as :func:`watch_workspace` gave them before it was made.
    """
    config = llm.llm_engine.vllm_config
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    rank = Rank(
        runner=runner,
        layers=config.compilation_config.static_forward_context,
        requests=requests,
    )
    lines, not_read = read_lines(rank)
    gpu = torch.cuda.get_device_properties(runner.device)
    return {
        "lines": lines,
        "not_read": not_read,
        "gpu": {
            "name": gpu.name,
            "arch": [gpu.major, gpu.minor],
            "sms": gpu.multi_processor_count,
            "memory_bytes": gpu.total_memory,
        },
    }


def read_lines(rank: Rank) -> tuple[dict[str, int], dict[str, str]]:
    """Bytes by a plan's key, and why others were not read; what is not there has no entry."""
    lines: dict[str, int] = {}
    not_read: dict[str, str] = {}
    for key, reader in _READERS.items():
        try:
            size = reader(rank)
        except _UNREADABLE as error:
            not_read[key] = f"{type(error).__name__}: {error}"
            continue
        if size is not None:
            lines[key] = size
    return lines, not_read


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of what tensors are views of, each once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # Without memory, as on the meta device, the storage itself tells them apart.
        sizes[storage.data_ptr() or storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _models(rank: Rank) -> Iterator[torch.nn.Module]:
    """The model, and the drafter's (``v1/worker/gpu/spec_decode/speculator.py``)."""
    yield rank.runner.model
    if rank.runner.speculator is not None:
        yield rank.runner.speculator.model


def _loaded(rank: Rank) -> Iterator[tuple[str, torch.Tensor]]:
    for model in _models(rank):
        yield from model.named_parameters()
        yield from model.named_buffers()


def _weights(rank: Rank) -> int:
    return storage_bytes(tensor for name, tensor in _loaded(rank) if not name.endswith(_ROPE))


def _rope(rank: Rank) -> int:
    return storage_bytes(tensor for name, tensor in _loaded(rank) if name.endswith(_ROPE))


def _impls(rank: Rank) -> list[Any]:
    """Of the layers with MLA (``model_executor/layers/attention/mla_attention.py``)."""
    impls = [layer.impl for layer in rank.layers.values() if hasattr(layer, "impl")]
    if not impls:
        raise NotReadError("no layer has an attention implementation")
    return impls


def _topk(rank: Rank) -> int:
    """The drafter's layers are given the model's buffer, their groups keep their own.

    ``models/deepseek_v32/nvidia/model.py`` and ``mtp.py``,
    ``v1/worker/gpu/spec_decode/eagle/utils.py``.
    """
    layers = [layer for layer in rank.layers.values() if hasattr(layer, "impl")]
    return storage_bytes(
        [layer.topk_indices_buffer for layer in layers]
        + [impl.index_group.logical_topk_indices for impl in _impls(rank)]
    )


def _index_groups(rank: Rank) -> int:
    """``v1/attention/backends/mla/index_group.py``."""
    groups = [impl.index_group for impl in _impls(rank)]
    return storage_bytes(
        tensor for g in groups for tensor in (g.physical_topk_indices, g.valid_topk_counts)
    )


def _workspace(rank: Rank) -> tuple[int, int, int] | None:
    """Slab, scratch and counters of trtllm-gen's workspace; None where no class has it."""
    impls = [impl for impl in _impls(rank) if hasattr(impl, "_plans")]
    if not impls:
        return None
    slab = max(plan.slab_bytes for impl in impls for plan in impl._plans.values())
    total = storage_bytes(impl._buffers.workspace for impl in impls)
    return slab, total - slab, storage_bytes(impl._buffers.counters for impl in impls)


def _of_workspace(index: int) -> Callable[[Rank], int | None]:
    def part(rank: Rank) -> int | None:
        parts = _workspace(rank)
        return None if parts is None else parts[index]

    return part


def _partials(rank: Rank) -> int | None:
    """The other kernels' workspace, which plans nothing."""
    ours = [impl for impl in _impls(rank) if hasattr(impl, "_buffers")]
    others = [impl._buffers.workspace for impl in ours if not hasattr(impl, "_plans")]
    return storage_bytes(others) or None


def _pcp_gather(rank: Rank) -> int | None:
    """What prefills gather keys of all ranks in, under PCP with DCP."""
    gathers = [i for i in _impls(rank) if getattr(i, "gather_plan", None) is not None]
    return storage_bytes(impl._workspace for impl in gathers) or None


def _gather(rank: Rank) -> int:
    found = [size for name, size in rank.requests.items() if name.rpartition(".")[2] in GATHERING]
    if not found:
        raise NotReadError(f"none of {', '.join(GATHERING)} asked for the shared workspace")
    return max(found)


def _shared_workspace(rank: Rank) -> int:
    """All of it, whoever asked for most: experts do, where the context is short."""
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        raise NotReadError("vLLM made no shared workspace")
    parts = workspace.current_workspace_manager()._current_workspaces
    return storage_bytes(part for part in parts if part is not None)


def _groups(rank: Rank) -> list[Any]:
    """The runner's attention groups, and those that the drafter makes once more.

    ``v1/worker/gpu/model_runner.py``, ``v1/worker/gpu/spec_decode/speculator.py``,
    ``AttentionGroup`` of ``v1/worker/utils.py``.
    """
    made = list(rank.runner.attn_groups)
    if rank.runner.speculator is not None:
        made += rank.runner.speculator.attn_groups
    return [group for groups in made for group in groups]


def _builders(rank: Rank, mark: str) -> list[Any]:
    """Metadata builders that have an attribute, each once."""
    builders = {id(b): b for group in _groups(rank) for b in group.metadata_builders}
    found = [builder for builder in builders.values() if hasattr(builder, mark)]
    if not found:
        raise NotReadError(f"no metadata builder has {mark}")
    return found


#: ``model_executor/layers/attention/sparse_mla_attention.py``, ``v1/attention/backends/mla/
#: indexer.py``: the largest buffer of each kind of builder, by which it is known.
_CONTEXT, _MASK, _TABLES = (
    "chunked_prefill_workspace",
    "topk_mask_workspace",
    "expanded_block_table_buffer",
)


def _context_rows(rank: Rank) -> int:
    return storage_bytes(getattr(builder, _CONTEXT) for builder in _builders(rank, _CONTEXT))


def _mask(rank: Rank) -> int | None:
    masks = [getattr(builder, _MASK) for builder in _builders(rank, _CONTEXT)]
    return storage_bytes(mask for mask in masks if mask is not None) or None


def _mla_state(rank: Rank) -> int:
    return _others(rank, _CONTEXT, _MASK)


def _indexer_tables(rank: Rank) -> int:
    return storage_bytes(getattr(builder, _TABLES) for builder in _builders(rank, _TABLES))


def _indexer_state(rank: Rank) -> int:
    return _others(rank, _TABLES)


def _others(rank: Rank, mark: str, *more: str) -> int:
    """Tensors on the device that builders keep beside the named ones."""
    kind = torch.device(rank.runner.device).type
    return storage_bytes(
        value
        for builder in _builders(rank, mark)
        for name, value in vars(builder).items()
        if name not in (mark, *more)
        and isinstance(value, torch.Tensor)
        and value.device.type == kind
    )


def _block_tables(rank: Rank) -> int:
    """``v1/worker/gpu/block_table.py``; a table a group of caches, and one slot mapping."""
    tables = rank.runner.block_tables
    return storage_bytes(
        [
            *(table.gpu for table in tables.block_tables),
            *tables.input_block_tables,
            tables.slot_mappings,
        ]
    )


def _block_bytes(rank: Rank) -> int:
    """All caches of the rank, the indexer's too, are views of one allocation."""
    size, blocks = storage_bytes(rank.runner.kv_caches), rank.runner.kv_cache_config.num_blocks
    if not blocks or size % blocks:
        raise NotReadError(f"{size} bytes of KV cache are no whole number of {blocks} blocks")
    return size // blocks


_READERS: dict[str, Callable[[Rank], int | None]] = {
    "weights": _weights,
    "rope": _rope,
    "topk": _topk,
    "index_groups": _index_groups,
    "slab": _of_workspace(0),
    "scratch": _of_workspace(1),
    "counters": _of_workspace(2),
    "partials": _partials,
    "pcp_gather": _pcp_gather,
    "gather": _gather,
    "shared_workspace": _shared_workspace,
    "context_rows": _context_rows,
    "mask": _mask,
    "mla_state": _mla_state,
    "indexer_tables": _indexer_tables,
    "indexer_state": _indexer_state,
    "block_tables": _block_tables,
    "kv.block_bytes": _block_bytes,
}
