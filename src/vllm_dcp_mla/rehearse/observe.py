"""What one rank notes while it serves: late compilations, waits for the GPU, collectives, memory.

Everything is attributed to whoever caused it: the innermost frame of vLLM or of this package on the
stack. A late compilation or a wait of stock's own is noted and let pass; one of ours raises where
vLLM was told to (``jit_monitor_mode``, ``VLLM_GPU_SYNC_CHECK``).
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

OURS = "vllm_dcp_mla"
_STOCK = "vllm"
_LAST_BYTES = 256
#: Collectives of vLLM's process groups; those of torch that are called past them come beside.
_GROUP_CALLS = (
    "_all_reduce_out_place",
    "all_gather",
    "all_gatherv",
    "reduce_scatter",
    "reduce_scatterv",
    "broadcast",
)


@dataclass(slots=True)
class Notes:
    """What was seen since the engine became ready.

    Attributes:
        late_compiles: ``[owner, kernel]`` of each compilation.
        syncs: ``[owner, place]`` of each wait of the host for the GPU.
        collectives: of each that was called, in order: name, group and shape, and the ranks of the
            group. Groups of one name have other ranks in other processes.
    """

    late_compiles: list[tuple[str, str]] = field(default_factory=list)
    syncs: list[tuple[str, str]] = field(default_factory=list)
    collectives: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def clear(self) -> None:
        """Starts over, once everything is warm."""
        self.__init__()  # type: ignore[misc]


def install(notes: Notes, last_collective: Path) -> None:
    """Wraps what vLLM calls, in this process.

    Args:
        notes: filled from now on.
        last_collective: file that always names the collective called last, also while the process
            hangs in it.
    """
    _watch_compilations(notes)
    _watch_syncs(notes)
    _watch_collectives(notes, _LastCall(last_collective))


def owner() -> tuple[str, str]:
    """Whose code is running, ours or stock's, and where: the innermost frame of either."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if package == OURS and not name.startswith(f"{OURS}.rehearse"):
            return OURS, f"{name}:{frame.f_lineno}"
        if package == _STOCK and "jit_monitor" not in name and "gpu_sync_debug" not in name:
            return _STOCK, f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "other", "?"


def _watch_compilations(notes: Notes) -> None:
    from vllm.utils import jit_monitor

    report = jit_monitor._handle_jit_event

    def noted(*, backend: str, event: str, fn_name: str, detail: str | None = None) -> None:
        caller, place = owner()
        notes.late_compiles.append((caller, f"{fn_name} ({backend}, {place})"))
        if caller == OURS:
            report(backend=backend, event=event, fn_name=fn_name, detail=detail)

    jit_monitor._handle_jit_event = noted


def _watch_syncs(notes: Notes) -> None:
    from vllm.utils import gpu_sync_debug

    explicit, implicit = gpu_sync_debug._sync_warning_hook, gpu_sync_debug._report_implicit_sync

    def noted_explicit(message: Any, *args: Any, **kwargs: Any) -> Any:
        waits = gpu_sync_debug._TORCH_SYNC_WARNING in str(message)  # not any other warning
        checked = gpu_sync_debug._checking.get() is not None
        if waits and checked and not gpu_sync_debug._allow_depth.get():
            caller, place = owner()
            notes.syncs.append((caller, place))
            if caller != OURS:
                return None
        return explicit(message, *args, **kwargs)

    def noted_implicit(op: str, direction: str, reason: str, mode: str) -> None:
        caller, place = owner()
        notes.syncs.append((caller, f"{place}: {op} {direction}, {reason}"))
        if caller == OURS:
            implicit(op, direction, reason, mode)

    gpu_sync_debug._sync_warning_hook = noted_explicit
    gpu_sync_debug._report_implicit_sync = noted_implicit


def _watch_collectives(notes: Notes, last: _LastCall) -> None:
    import torch
    from vllm.distributed.parallel_state import GroupCoordinator

    for name in _GROUP_CALLS:
        stock = getattr(GroupCoordinator, name)

        def counted(
            group: Any,
            x: Any,
            *args: Any,
            _stock: Callable[..., Any] = stock,
            _name: str = name,
            **kwargs: Any,
        ) -> Any:
            call = f"{_name.strip('_')} {group.unique_name} {_shape(x)}"
            _count(notes, last, call, group.ranks)
            return _stock(group, x, *args, **kwargs)

        setattr(GroupCoordinator, name, counted)
    distributed: Any = torch.distributed
    exchange = distributed.all_to_all_single

    def counted_exchange(out: Any, x: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        _count(notes, last, f"all_to_all {_shape(x)}", distributed.get_process_group_ranks(group))
        return exchange(out, x, *args, group=group, **kwargs)

    distributed.all_to_all_single = counted_exchange
    gather = distributed.all_gather_into_tensor

    def counted_gather(out: Any, x: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        call = f"all_gather_into_tensor {_shape(out)}"
        _count(notes, last, call, distributed.get_process_group_ranks(group))
        return gather(out, x, group, *args, **kwargs)

    distributed.all_gather_into_tensor = counted_gather


def _count(notes: Notes, last: _LastCall, call: str, ranks: Iterable[int]) -> None:
    notes.collectives.append((call, tuple(ranks)))
    last.write(f"{len(notes.collectives)}: {call}")


def _shape(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return "-" if shape is None else f"{tuple(shape)} {getattr(x, 'dtype', '')}"


class _LastCall:
    """A file that a stuck process need not write any more: its memory is the file."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b" " * _LAST_BYTES)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAST_BYTES)

    def write(self, text: str) -> None:
        self._memory[:] = text.encode(errors="replace")[:_LAST_BYTES].ljust(_LAST_BYTES)
