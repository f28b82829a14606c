from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from vllm_dcp_mla import device_buffer, softmax_stats_bytes  # noqa: E402
from vllm_dcp_mla.key_splits import partial_bytes  # noqa: E402
from vllm_dcp_mla.workspace import DEFAULT_SLAB_LIMIT_BYTES, counter_bytes  # noqa: E402

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_buffers")


def acquire(heads=64, tokens=32_768, device=CPU, limit=DEFAULT_SLAB_LIMIT_BYTES, given=None):
    return device_buffer.acquire(
        device, heads, tokens, slab_limit_bytes=limit, workspace_bytes=given
    )


@pytest.mark.parametrize("heads", [64, 128])
def test_size_at_the_default_limit(heads):
    buffers, plan = acquire(heads)
    assert buffers.workspace.numel() == plan.total_bytes == 951_058_432
    assert buffers.workspace.dtype == torch.int8
    assert not buffers.workspace[:: 1 << 20].any()


def test_buffers_are_zero_whatever_lay_there(monkeypatch):
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: real(*a, **k).fill_(1))
    buffers, _ = acquire(8, 16)
    assert not buffers.workspace[::4096].any()
    assert not buffers.counters.any()


def test_one_buffer_a_device():
    first, _ = acquire()
    again, _ = acquire()
    other, _ = acquire(device=torch.device("meta"))
    assert again is first
    assert other is not first


def test_memory_for_partial_results_is_made_once_a_device_beside_the_other():
    first, _ = acquire(8, 16)
    made = device_buffer.acquire_partials(CPU, 512)
    assert made.workspace.numel() == partial_bytes(512, device_buffer.num_sms(CPU))
    assert device_buffer.acquire_partials(CPU, 512) is made
    assert acquire(8, 16)[0] is first
    assert made.workspace.data_ptr() != first.workspace.data_ptr()


def test_memory_for_partial_results_of_a_larger_model_is_refused():
    device_buffer.acquire_partials(CPU, 256)
    with pytest.raises(ValueError, match=r"512 latent dims need \d+ bytes, but .* made \d+ on cpu"):
        device_buffer.acquire_partials(CPU, 512)


@pytest.mark.parametrize(
    ("heads", "tokens", "limit"),
    [
        (64, 4096, DEFAULT_SLAB_LIMIT_BYTES),
        (128, 4096, DEFAULT_SLAB_LIMIT_BYTES),
        (64, 8192, 1 << 33),
    ],
)
def test_a_later_caller_plans_against_what_is_there(heads, tokens, limit):
    first, small = acquire(tokens=512)
    address, size = first.workspace.data_ptr(), first.workspace.numel()
    later, plan = acquire(heads, tokens, limit=limit)
    assert (later.workspace.data_ptr(), later.workspace.numel()) == (address, size)
    assert plan.total_bytes == small.total_bytes == size
    assert plan.slab_bytes <= size - (64 << 20)
    assert plan.tokens_per_launch < tokens
    assert later.counters.numel() >= counter_bytes(heads, plan.tokens_per_launch, 1)


def test_one_token_that_does_not_fit_names_both_sizes():
    acquire(8, 1, given=(64 << 20) + softmax_stats_bytes(8, 1))
    with pytest.raises(
        ValueError, match=r"A workspace of 68173824 bytes .* 68419584 bytes are needed"
    ):
        acquire(128, 1)


def test_users_size_counts_for_the_first_caller():
    buffers, plan = acquire(given=104_857_600)
    assert buffers.workspace.numel() == 104_857_600
    assert plan.tokens_per_launch == 280
    assert acquire(given=1 << 30)[0] is buffers


def test_a_device_needs_its_number():
    with pytest.raises(ValueError, match="cuda:0"):
        acquire(device=torch.device("cuda"))


def test_the_default_device_does_not_matter():
    with torch.device("meta"):
        buffers, _ = acquire()
        assert device_buffer.kernel_device() != torch.device("meta")
    assert buffers.workspace.device == CPU


@pytest.fixture
def worker(monkeypatch):
    import sys

    from vllm_dcp_mla.compat import sleep

    class Worker:
        woken = 0

        def wake_up(self, tags=None):
            self.woken += 1

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", SimpleNamespace(Worker=Worker))
    sleep.install()
    sleep.install()
    return Worker()


@pytest.mark.parametrize(
    ("tags", "zeroed"), [(None, True), (["weights"], True), (["kv_cache"], False)]
)
def test_waking_up_zeroes_what_came_back_with_the_weights(worker, tags, zeroed):
    buffers, _ = acquire(8, 16)
    buffers.workspace.fill_(1)
    buffers.counters.fill_(1)
    worker.wake_up(tags)
    assert worker.woken == 1
    assert bool(buffers.workspace.any()) is not zeroed
    assert bool(buffers.counters.any()) is not zeroed


def test_a_process_without_a_gpu_worker_is_left_alone(monkeypatch):
    import sys

    from vllm_dcp_mla.compat import sleep

    monkeypatch.delitem(sys.modules, "vllm.v1.worker.gpu_worker", raising=False)
    sleep.install()
    assert "vllm.v1.worker.gpu_worker" not in sys.modules
