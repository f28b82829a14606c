"""All checks in order."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from ..compat.installed import installed_version
from ..planner.request import Request
from .discovery import check_allowed, check_discovered, check_members, check_settings, members
from .flashinfer_source import check_launcher, check_signature
from .limits import check_limits
from .machine import check_gpu, check_libraries, check_torch
from .processes import run_probe
from .report import Check, Report, Selection
from .selection import check_selection
from .versions import INSTALL_VLLM, check_symbols, check_versions


def examine(request: Request | list[str], *, backend: str | None, select: bool) -> Report:
    """Runs every check; tens of seconds where vLLM is installed.

    Args:
        request: the configuration to select a backend for, or what is wrong with it.
        backend: ``--attention-backend``, or None.
        select: whether to ask vLLM for its selection.
    """
    environ = os.environ
    problems = request if isinstance(request, list) else request.problems()
    with ThreadPoolExecutor() as pool:
        metadata = pool.submit(run_probe, "metadata")
        runtime = pool.submit(run_probe, "runtime", members())
        possible = None if problems or isinstance(request, list) else request
        selected = pool.submit(_select, possible, backend) if select and possible else None
        checks = [
            *(_check_configuration(problem) for problem in problems),
            *check_discovered(metadata.result()),
            check_allowed(environ),
            check_settings(environ),
            *(check_limits(possible, environ) if possible else ()),
            *check_versions(),
            check_symbols(),
            check_signature(),
            check_launcher(),
            *check_libraries(),
            check_torch(runtime.result()),
            check_gpu(runtime.result()),
            *check_members(runtime.result(), environ),
        ]
        if selected is None:
            return Report(checks)
        check, selection = selected.result()
    return Report([*checks, check], selection)


def _check_configuration(problem: str) -> Check:
    expected = "sizes that fit each other and the model"
    return Check("configuration", "fail", problem, expected, "change the flag that it names")


def _select(request: Request, backend: str | None) -> tuple[Check, Selection]:
    if installed_version("vllm") is None:
        found = "vLLM is not installed"
        return Check("selection", "fail", found, "an answer", INSTALL_VLLM), Selection()
    return check_selection(request, backend)
