"""Whether this package's limits hold what a configuration needs at least."""

from __future__ import annotations

from collections.abc import Mapping

from ..compat.libraries import libraries_here
from ..planner.plan import make_plan
from ..planner.request import Request, RequestError, find_gpu
from ..settings import SettingsError, load_settings, user_workspace_bytes
from .report import Check


def check_limits(request: Request, environ: Mapping[str, str]) -> list[Check]:
    """An engine raises at a limit that is too small, once vLLM has selected a backend.

    Nothing is said where no limit is used, and where other checks fail or warn: a GPU that is not
    here, a setting that cannot be read, a package that is switched off, a configuration that
    nothing serves.

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
    if settings.disable:
        return []
    plan = make_plan(request, gpu, libraries_here(), settings, user_workspace)
    expected = "limits that hold the least that this configuration needs"
    if plan.limit:
        return [Check("limits", "fail", plan.limit, expected, "raise or unset what it names")]
    if plan.served_by is None or plan.ours is None:
        return []
    return [Check("limits", "pass", "they hold what this configuration needs", expected)]
