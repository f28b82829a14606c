"""Whether this package's limits hold what a configuration needs at least."""

from __future__ import annotations

from collections.abc import Mapping

from ..compat.libraries import libraries_here
from ..planner.plan import limit_problems
from ..planner.request import Request, RequestError, find_gpu
from ..settings import SettingsError, load_settings, user_workspace_bytes
from .report import Check


def check_limits(request: Request, environ: Mapping[str, str]) -> list[Check]:
    """An engine raises at a limit that is too small, once vLLM has selected a backend.

    Nothing is said where other checks fail: a GPU that is not here, a setting that cannot be read.

    Args:
        request: a configuration whose sizes are possible.
        environ: the environment, for the settings.
    """
    try:
        gpu = find_gpu(request.gpu)
        settings = load_settings(environ=environ)
        user_workspace = user_workspace_bytes(environ)
    except (RequestError, SettingsError):
        return []
    problems = limit_problems(request, gpu, libraries_here(), settings, user_workspace)
    expected = "room for one token, and for one row of candidates"
    if problems:
        fix = "raise or unset what it names"
        return [Check("limits", "fail", " ".join(problems), expected, fix)]
    return [Check("limits", "pass", expected, expected)]
