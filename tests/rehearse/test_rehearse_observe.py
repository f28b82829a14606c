import types
import warnings
from types import SimpleNamespace

import pytest

from vllm_dcp_mla.rehearse import observe
from vllm_dcp_mla.rehearse.observe import Notes, owner

OURS, STOCK = "vllm_dcp_mla", "vllm"
SYNC = "called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)"


def through(call, *names):
    """Calls something from functions that seem to be of these modules, the last one innermost."""
    for name in reversed(names):
        module = types.ModuleType(name)
        source = "def step(*args, **kwargs):\n    return inner(*args, **kwargs)\n"
        exec(compile(source, f"{name}.py", "exec"), module.__dict__)
        module.inner = call
        call = module.step
    return call


@pytest.mark.parametrize(
    ("frames", "wanted"),
    [
        (["vllm_dcp_mla.indexer"], (OURS, "vllm_dcp_mla.indexer:2")),
        (["vllm.worker"], (STOCK, "vllm.worker:2")),
        (["vllm.worker", "vllm_dcp_mla.backends.trtllm"], (OURS, "vllm_dcp_mla.backends.trtllm:2")),
        (["vllm_dcp_mla.indexer", "vllm.ops"], (STOCK, "vllm.ops:2")),
        (["vllm_dcp_mla.indexer", "triton.runtime.jit"], (OURS, "vllm_dcp_mla.indexer:2")),
        (["vllm_dcp_mla", "vllm.utils.jit_monitor"], (OURS, "vllm_dcp_mla:2")),
        (["vllm.worker", "vllm.utils.gpu_sync_debug"], (STOCK, "vllm.worker:2")),
        (["vllm.worker", "vllm_dcp_mla.rehearse.observe"], (STOCK, "vllm.worker:2")),
        (["vllm_dcp_mla.rehearse.rank"], ("other", "?")),
        (["vllm_flash_attn.x", "vllm_dcp_mla_other"], ("other", "?")),
        ([], ("other", "?")),
    ],
)
def test_the_innermost_frame_of_ours_or_stocks_is_the_owner(frames, wanted):
    assert through(owner, *frames)() == wanted


def test_notes_start_over():
    notes = Notes()
    notes.late_compiles.append((OURS, "k"))
    notes.collectives.append(("broadcast", (0, 1)))
    notes.clear()
    assert (notes.late_compiles, notes.syncs, notes.collectives) == ([], [], [])


def test_the_last_call_is_in_the_file_at_once(tmp_path):
    last = observe._LastCall(tmp_path / "last")
    assert (tmp_path / "last").read_text().strip() == ""
    last.write("7: all_reduce tp:0 (3,)")
    assert (tmp_path / "last").read_text().strip() == "7: all_reduce tp:0 (3,)"
    last.write("8: x")
    assert (tmp_path / "last").read_text().strip() == "8: x", "nothing of the one before is left"
    last.write("y" * 1000)
    assert (tmp_path / "last").read_text() == "y" * 256


@pytest.fixture
def stock(monkeypatch):
    """vLLM's monitors and collectives, as they were once the test is over."""
    pytest.importorskip("vllm")
    import torch
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.utils import gpu_sync_debug, jit_monitor

    monkeypatch.setattr(jit_monitor, "_handle_jit_event", jit_monitor._handle_jit_event)
    for name in ("_sync_warning_hook", "_report_implicit_sync", "_prev_showwarning"):
        monkeypatch.setattr(gpu_sync_debug, name, getattr(gpu_sync_debug, name))
    for name in observe._GROUP_CALLS:
        monkeypatch.setattr(GroupCoordinator, name, lambda group, x, *a, **k: (x, a, k))
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda out, x, *a, **k: (x, a, k))
    ranks = {"g": [4, 7]}
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", ranks.__getitem__)
    return SimpleNamespace(
        jit=jit_monitor, sync=gpu_sync_debug, group=GroupCoordinator, torch=torch
    )


@pytest.fixture
def notes(stock, tmp_path):
    made = Notes()
    observe.install(made, tmp_path / "last")
    return made


def compile_late(stock, *frames):
    def compile_now():
        stock.jit._handle_jit_event(backend="Triton", event="JIT", fn_name="_kernel", detail="d")

    through(compile_now, *frames)()


@pytest.mark.vllm
def test_a_late_compilation_of_stocks_is_noted_and_let_pass(stock, notes, monkeypatch):
    monkeypatch.setattr(stock.jit, "_mode", "error")
    compile_late(stock, "vllm_dcp_mla.indexer", "vllm.ops")
    assert notes.late_compiles == [(STOCK, "_kernel (Triton, vllm.ops:2)")]


@pytest.mark.vllm
def test_a_late_compilation_of_ours_raises_where_vllm_was_told_to(stock, notes, monkeypatch):
    monkeypatch.setattr(stock.jit, "_mode", "error")
    with pytest.raises(RuntimeError, match="_kernel"):
        compile_late(stock, "vllm.worker", "vllm_dcp_mla.indexer", "triton.runtime")
    monkeypatch.setattr(stock.jit, "_mode", "warn")
    compile_late(stock, "vllm_dcp_mla.indexer")
    assert [caller for caller, _ in notes.late_compiles] == [OURS, OURS]


@pytest.mark.vllm
def test_the_hooks_of_stocks_monitor_reach_the_notes(stock, notes, monkeypatch):
    """What Triton calls after a compilation, not only the function behind it."""
    from triton import knobs

    monkeypatch.setattr(stock.jit, "HAS_TRITON", True)  # which takes a GPU
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    stock.jit._setup_triton_jit_hook()
    kernel = SimpleNamespace(name="_late", jit_function=None)
    call = knobs.runtime.jit_post_compile_hook
    through(call, "vllm.ops")(key="k", repr="_late()", fn=kernel, compile={})
    ((caller, what),) = notes.late_compiles
    assert caller == STOCK
    assert what.startswith("_late")


def wait(stock, message, *frames):
    """As torch warns of a wait inside a call that vLLM checks."""

    def warn():
        warnings.warn(message, UserWarning, stacklevel=1)

    through(warn, *frames)()


@pytest.fixture
def checked(stock, notes, monkeypatch):
    monkeypatch.setattr(stock.torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(stock.torch.cuda, "set_sync_debug_mode", lambda mode: None)
    return stock.sync._checked_region


@pytest.mark.vllm
def test_a_wait_of_stocks_is_noted_and_one_of_ours_raises(stock, notes, checked):
    with warnings.catch_warnings(), checked("error"):
        wait(stock, SYNC, "vllm_dcp_mla.indexer", "vllm.ops")
        with pytest.raises(RuntimeError, match="GPU<->CPU sync detected"):
            wait(stock, SYNC, "vllm.worker", "vllm_dcp_mla.indexer")
    assert notes.syncs == [(STOCK, "vllm.ops:2"), (OURS, "vllm_dcp_mla.indexer:2")]


@pytest.mark.vllm
def test_a_wait_that_is_allowed_or_unchecked_is_none(stock, notes, checked):
    with warnings.catch_warnings():
        with checked("error"), stock.sync._allow_syncs():
            wait(stock, SYNC, "vllm_dcp_mla.indexer")
        with checked("error"):
            pass
        wait(stock, SYNC, "vllm_dcp_mla.indexer")  # the hook stays; nothing is checked
    assert notes.syncs == []


@pytest.mark.vllm
def test_another_warning_is_no_wait_and_is_still_shown(stock, notes, checked):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with checked("error"):
            wait(stock, "a shape is odd", "vllm_dcp_mla.indexer")
            wait(stock, "a shape is even", "vllm.ops")
    assert notes.syncs == []
    assert [str(one.message) for one in shown] == ["a shape is odd", "a shape is even"]


@pytest.mark.vllm
def test_implicit_waits_too(stock, notes):
    report = lambda: stock.sync._report_implicit_sync(  # noqa: E731
        "copy_", "D2H", "the CPU tensor is not pinned", "error"
    )
    through(report, "vllm.ops")()
    with pytest.raises(RuntimeError, match="silently synchronous"):
        through(report, "vllm_dcp_mla.indexer")()
    assert notes.syncs == [
        (STOCK, "vllm.ops:2: copy_ D2H, the CPU tensor is not pinned"),
        (OURS, "vllm_dcp_mla.indexer:2: copy_ D2H, the CPU tensor is not pinned"),
    ]


def step_of(stock, rank, extra=False):
    """The collectives of a step, as one of two ranks calls them."""
    torch, group = stock.torch, SimpleNamespace(unique_name="dcp:0", ranks=[0, 1])
    x = torch.full((3, 4), float(rank))
    stock.group._all_reduce_out_place(group, x)
    answer = stock.group.all_gather(group, x, 0)
    stock.group.reduce_scatterv(group, x, dim=0, sizes=[1, 2])
    stock.torch.distributed.all_to_all_single(x, x, group="g")
    if extra:
        stock.group.broadcast(group, x)
    return answer


@pytest.mark.vllm
def test_collectives_are_noted_alike_on_two_ranks(stock, notes, tmp_path):
    seen = []
    for rank, extra in ((0, False), (1, False), (1, True)):
        notes.clear()
        x, arguments, _ = step_of(stock, rank, extra)
        assert (x[0, 0].item(), arguments) == (rank, (0,)), "stock's own is called"
        seen.append(list(notes.collectives))
    assert seen[0] == seen[1]
    assert [len(calls) for calls in seen] == [4, 4, 5]
    assert seen[2][:4] == seen[1]
    assert [ranks for _, ranks in seen[2]] == [(0, 1), (0, 1), (0, 1), (4, 7), (0, 1)]
    said = (tmp_path / "last").read_text().strip()
    assert said == "5: broadcast dcp:0 (3, 4) torch.float32"


@pytest.mark.vllm
def test_another_shape_group_or_order_is_noted(stock, notes):
    torch, seen = stock.torch, set()
    one, two = (SimpleNamespace(unique_name=name, ranks=[0]) for name in ("dcp:0", "tp:0"))
    small, large = torch.zeros(2), torch.zeros(3)
    for calls in ([(one, small), (two, large)], [(two, large), (one, small)], [(one, large)] * 2):
        notes.clear()
        for group, x in calls:
            stock.group.all_gather(group, x)
        seen.add(tuple(notes.collectives))
    assert len(seen) == 3


@pytest.mark.vllm
def test_every_wrapped_collective_is_of_stocks_group():
    """In a vLLM that renamed one, installing must not pass unnoticed."""
    from vllm.distributed.parallel_state import GroupCoordinator

    for name in observe._GROUP_CALLS:
        assert callable(getattr(GroupCoordinator, name)), name
