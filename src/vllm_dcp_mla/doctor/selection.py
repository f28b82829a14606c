"""Which backend stock vLLM picks, asked of vLLM itself."""

from __future__ import annotations

from ..planner.request import LOCAL, Request, RequestError, find_gpu
from ..plugin import ALIAS, alias
from ..simulate.selection import Question, SelectionError, ask
from .report import Check, Selection

_NAME = "selection"
_EXPECTED = "a backend that vLLM picks"


def check_selection(request: Request, backend: str | None) -> tuple[Check, Selection]:
    """Asks vLLM, in a process of its own; tens of seconds.

    Args:
        request: a configuration whose sizes are possible.
        backend: ``--attention-backend``, or None.
    """
    if request.gpu == LOCAL:
        try:
            find_gpu(LOCAL)
        except RequestError as error:
            fix = "name a GPU with --gpu, such as b200"
            return Check(_NAME, "fail", str(error), _EXPECTED, fix), Selection()
    try:
        answer = ask(
            Question(
                model_config=request.config,
                gpu=None if request.gpu == LOCAL else request.gpu,
                tp=request.tp,
                pcp=request.pcp,
                dcp=request.dcp,
                kv_cache_dtype=request.kv_cache_dtype,
                max_num_batched_tokens=request.max_num_batched_tokens,
                comm=request.comm,
                backend=backend,
            )
        )
    except SelectionError as error:
        fix = "change the configuration as it says, or see the checks above"
        if backend == ALIAS != alias():
            fix = f"with this vLLM the name is {alias()}: --attention-backend {alias()}"
        found = " ".join(str(error).split())
        return Check(_NAME, "fail", found, _EXPECTED, fix), Selection()
    selection = Selection(answer.picked, answer.cls, answer.refused)
    if answer.picked is None or answer.cls is None:
        found = " ".join((answer.error or "none").split())
        if backend is None and answer.refused:
            # vLLM's message lists the reasons of every backend; the selection has them.
            found = f"none: all refuse, {', '.join(answer.refused)} for the reasons listed"
        fix = "see `plan` with the same flags for what works"
        return Check(_NAME, "fail", found, _EXPECTED, fix), selection
    whose = "ours" if answer.cls.startswith("vllm_dcp_mla.") else "not ours"
    found = f"{answer.picked} with a {answer.kv_cache_dtype} cache; its class is {whose}"
    return Check(_NAME, "pass", found, _EXPECTED), selection
