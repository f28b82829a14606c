"""Flags: those of what was planned, and those to change where nothing serves it."""

from __future__ import annotations

from dataclasses import replace

from ..capability import TABLE, Deployment, refusals, suggestion
from ..capability_rules import arch_name
from .defaults import model_defaults
from .request import Request
from .workload import Workload


def refused_by_all(request: Request, d: Deployment) -> list[str]:
    """Why no backend serves a request, each's reasons, and the nearest that is served."""
    problems = [f"{r.name} refuses: {'; '.join(refusals(r.name, d))}." for r in TABLE]
    # Seen from the model's default exchange, so that a change of it is named too.
    comm = request.comm or model_defaults(request.config).comm
    other = suggestion(replace(d, comm=comm))
    problems.append(
        f"No backend serves this on {arch_name(d.arch)}; use {other}."
        if other
        else f"No backend serves DCP with these {d.tp * d.pcp} GPUs ({arch_name(d.arch)}); leave "
        "out --decode-context-parallel-size."
    )
    return problems


def flags_of(request: Request, d: Deployment, workload: Workload) -> list[str]:
    """vLLM's flags of what was planned, one a line."""
    flags = [f"--tensor-parallel-size {d.tp}"]
    if d.pcp > 1:
        flags.append(f"--prefill-context-parallel-size {d.pcp}")
    if d.dcp > 1:
        flags.append(f"--decode-context-parallel-size {d.dcp}")
        if d.pcp > 1 or request.comm is not None:
            flags.append(f"--dcp-comm-backend {d.comm}")
    flags.append(f"--kv-cache-dtype {d.kv_cache_dtype}")
    flags.append(f"--max-num-batched-tokens {request.max_num_batched_tokens}")
    flags.extend(request.other_flags(workload))
    return flags
