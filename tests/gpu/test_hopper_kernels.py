"""The three kernels of the Hopper class on an SM90 GPU; run with ``pytest tests/gpu -m gpu``.

compute-sanitizer 2025.3 finds nothing in them, but its memcheck and synccheck change what one
Triton variant computes: fp8_e4m3 in blocks of 64 heads and 64 keys with 3 stages, whose products
wait for each other, with spilled registers loaded meanwhile. Its racecheck does not, nor do they
with other tilings; without them 150 launches beside other work left the same bits.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not SM90, reason="no SM90 GPU here"),
]
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from kernel_batches import NOPE, ROPE, expected, make_batch, make_partials  # noqa: E402
from kernel_checks import CACHES, agrees_with_float64, check, launch  # noqa: E402

from vllm_dcp_mla.bench.candidates import CANDIDATES  # noqa: E402
from vllm_dcp_mla.key_splits import CHOICES  # noqa: E402

CUDA = "cuda"
KERNELS = ("triton_decode", "flashmla", "flash_attn3")


def sms():
    return torch.cuda.get_device_properties(0).multi_processor_count


def kernel(name):
    from vllm_dcp_mla.kernels import load_kernel

    return load_kernel(name, num_sms=sms())


def agrees(name, tokens, heads, topk, **changes):
    changes = {"cache": "bf16", **changes}
    agrees_with_float64(kernel(name), tokens, heads, topk, num_sms=sms(), device=CUDA, **changes)


@pytest.mark.parametrize("heads", [1, 8, 13, 24, 64, 65, 128])
@pytest.mark.parametrize("cache", sorted(CACHES))
@pytest.mark.parametrize("dims", [ROPE, NOPE], ids=["rope", "nope"])
def test_triton_decode_at_any_head_count(heads, cache, dims):
    for tokens, topk in ((1, 1), (1, 2048), (3, 300), (9, 512), (140, 128), (200, 63)):
        agrees("triton_decode", tokens, heads, topk, cache=cache, dims=dims, seed=tokens + topk)


@pytest.mark.parametrize("tiling", CANDIDATES, ids=str)
def test_every_tiling(tiling):
    from vllm_dcp_mla.kernels.triton_decode import TritonDecodeKernel

    made = TritonDecodeKernel(sms(), tiling=tiling)
    for tokens, heads, topk in ((1, 64, 2048), (7, 13, 300), (16, 65, 512), (140, 64, 128)):
        for cache in CACHES:
            agrees_with_float64(
                *(made, tokens, heads, topk), num_sms=sms(), device=CUDA, cache=cache, seed=tokens
            )


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("name", ["flashmla", "flash_attn3"])
def test_shipped_kernels_and_the_base_of_their_lse(name, heads):
    for tokens, topk in ((1, 128), (1, 2048), (5, 512), (140, 128)):
        agrees(name, tokens, heads, topk, seed=tokens + topk)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("parts", [2, 5, 16])
def test_flashmla_in_parts(parts, heads):
    from vllm_dcp_mla.kernels.flashmla import FlashMlaKernel

    made = FlashMlaKernel(sms(), parts=parts)
    for tokens, topk in ((1, 128), (1, 2048), (3, 640), (4, 512)):
        seed = tokens + topk
        agrees_with_float64(made, tokens, heads, topk, num_sms=sms(), device=CUDA, seed=seed)


@pytest.mark.parametrize("heads", [1, 13, 24, 65])
def test_flash_attn3_at_odd_head_counts(heads):
    for tokens, topk in ((1, 300), (5, 512), (140, 63)):
        agrees("flash_attn3", tokens, heads, topk, seed=tokens + topk)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_apart(name):
    agrees(name, 6, 64, 256, row_gap=64)


@pytest.mark.parametrize("name", KERNELS)
def test_every_row_empty(name):
    batch = make_batch(4, 64, 128, counts=[0] * 4, device=CUDA)
    launch(kernel(name), batch, sms())
    check(kernel(name), batch)


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_rows_past_two_to_the_31_elements(cache):
    rows = (1 << 31) // 576 + 1000
    dtype = CACHES[cache]
    batch = make_batch(3, 64, 128, dtype=dtype, query_dtype=torch.bfloat16, device=CUDA)
    big = torch.empty(rows, 576, dtype=dtype, device=CUDA)
    shift = rows - batch.cache_rows.shape[0]
    big[shift:] = batch.cache_rows
    moved = replace(batch, cache_rows=big, topk=torch.where(batch.topk < 0, -1, batch.topk + shift))
    launch(kernel("triton_decode"), moved, sms())
    check(kernel("triton_decode"), batch_like(batch, moved))


def batch_like(batch, launched):
    """The small batch with the results of the big one."""
    return replace(batch, out=launched.out, lse=launched.lse)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("tokens", "topk"), [(2, 256), (2, 1024), (100, 256)])
def test_in_a_cuda_graph_with_other_keys_at_each_replay(name, tokens, topk):
    batch = make_batch(tokens, 64, topk, device=CUDA, seed=1)
    buffers = make_partials(sms(), CUDA)
    made = kernel(name)
    made.launch(batch, buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.launch(batch, buffers)
    for seed in (2, 3):
        other = make_batch(tokens, 64, topk, device=CUDA, seed=seed)
        for field in ("query", "topk", "counts", "out", "lse", "cache_rows"):
            getattr(batch, field).copy_(getattr(other, field))
        graph.replay()
        check(made, batch)


def test_nothing_waits_for_the_gpu_and_nothing_compiles_after_warm_up():
    import triton

    from vllm_dcp_mla.kernels import finish, spread, triton_decode

    for dtype in CACHES.values():
        triton_decode.warm_up(
            dtype,
            ROPE,
            dict.fromkeys(c.tiling for c in CHOICES),
            lambda kernel, *args: kernel.warmup(*args),
        )
    for each in (finish, spread):
        each.warm_up(ROPE, lambda kernel, *args: kernel.warmup(*args))
    compiled = []
    hook = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs["repr"])
    buffers = make_partials(sms(), CUDA)
    try:
        for tokens, heads, topk in ((1, 64, 128), (2, 1, 1), (16, 16, 16), (200, 65, 63)):
            for dtype in CACHES.values():
                batch = make_batch(
                    tokens, heads, topk, dtype=dtype, query_dtype=torch.bfloat16, device=CUDA
                )
                torch.cuda.set_sync_debug_mode("error")
                try:
                    kernel("triton_decode").launch(batch.tokens(slice(tokens // 3, None)), buffers)
                    finish.finish(batch, torch.zeros(heads, tokens, device=CUDA).T)
                    if tokens < 100:
                        cut = spread.spread(batch, 2, buffers)
                        spread.merge(batch, cut, torch.zeros(2 * tokens, heads, device=CUDA))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook
    assert compiled == []


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_widened_keys_are_exactly_the_caches(scale):
    """Every value of fp8, NaN too, in blocks apart, past 2^31 elements of the cache."""
    from vllm_dcp_mla.kernels import widen

    number, gap, block = 4000, 960, 64
    cache = torch.empty(number, block + gap, 576, dtype=torch.uint8, device=CUDA)
    blocks = cache[:, :block]
    blocks.copy_(torch.randint(256, blocks.shape, dtype=torch.uint8, device=CUDA))
    blocks = blocks.view(torch.float8_e4m3fn)
    assert blocks.stride(0) * (number - 1) > 1 << 31
    table = torch.randperm(number, device=CUDA).int()[: 3 * 700].view(3, 700)
    owners = torch.tensor([0] * 700 + [2] * 301, dtype=torch.int32, device=CUDA)
    firsts = torch.tensor([0, 700, 700], dtype=torch.int32, device=CUDA)
    wide = torch.full((1002 * block, 576), math.inf, dtype=torch.bfloat16, device=CUDA)
    moved = torch.full((number,), -7, dtype=torch.int32, device=CUDA)
    widen.widen(blocks, table, owners, firsts, scale, ROPE, wide=wide, moved=moved)
    used = torch.cat((table[0], table[2, :301])).long()
    wanted = (blocks[used].float() * scale).bfloat16().view(-1, 576)
    assert torch.equal(wide[: 1001 * block].nan_to_num(7e5), wanted.nan_to_num(7e5))
    assert wide[1001 * block :].isinf().all()
    assert torch.equal(moved[used], torch.arange(1001, dtype=torch.int32, device=CUDA))
    place, row = (torch.randint(most, (300, 2048), device=CUDA) for most in (1001, block))
    topk = (used[place] * (block + gap) + row).int()
    counts = torch.randint(2049, (300,), dtype=torch.int32, device=CUDA)
    held = torch.arange(2048, device=CUDA) < counts[:, None]
    topk = torch.where(held, topk, -1)
    widen.remap(topk, counts, moved, block_rows=block + gap, block_size=block)
    assert torch.equal(topk, torch.where(held, place * block + row, -1).int())


def test_widening_compiles_nothing_after_warm_up_and_waits_for_nothing():
    import triton

    from vllm_dcp_mla.kernels import widen

    widen.warm_up(ROPE, lambda kernel, *args: kernel.warmup(*args))
    compiled = []
    hook = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs["repr"])
    cache = torch.zeros(9, 64, 576, dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn)
    wide = torch.empty(9 * 64, 576, dtype=torch.bfloat16, device=CUDA)
    bounds = torch.arange(10, dtype=torch.int32, device=CUDA)
    table = bounds[:9].view(1, 9).expand(9, 9)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for few in (1, 2, 9):
            placed = bounds[:few], bounds[1 : few + 1] - 1
            arguments = cache[:, : few * 5], table[:few], *placed, 1.0, ROPE
            widen.widen(*arguments, wide=wide[few:], moved=bounds[1:].clone())
            topk = torch.zeros(few, 16 * few + 3, dtype=torch.int32, device=CUDA)
            widen.remap(
                *(topk[:, 1:], bounds[1 : few + 1] * 0, bounds[1:]), block_rows=few, block_size=few
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
        triton.knobs.runtime.jit_post_compile_hook = hook
    assert compiled == []


def test_memory_that_is_not_aligned_is_refused():
    batch = make_batch(2, 64, 1024, device=CUDA)
    memory = torch.zeros(batch.cache_rows.numel() + 1, dtype=torch.bfloat16, device=CUDA)
    crooked = replace(batch, cache_rows=memory[1:].view_as(batch.cache_rows))
    for name in ("triton_decode", "flashmla"):
        with pytest.raises(ValueError, match="cache_rows lies at"):
            kernel(name).launch(crooked, make_partials(sms(), CUDA))


@pytest.mark.parametrize("want_lse", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_rows_without_keys_are_cleared_by_the_launch(name, want_lse):
    """Whatever a library leaves there: FlashMLA's LSE is +inf."""
    batch = make_batch(5, 64, 128, counts=[0, 5, 0, 128, 0], device=CUDA, want_lse=want_lse)
    made = kernel(name)
    assert made.clears_empty_rows
    made.launch(batch, make_partials(sms(), CUDA))
    check(made, batch)


def test_splits_change_nothing_but_rounding():
    from vllm_dcp_mla.kernels import load_kernel

    batch = make_batch(2, 64, 2048, device=CUDA, seed=5)
    results = []
    for pretended in (1, 16, sms()):
        other = replace(batch, out=torch.empty_like(batch.out), lse=torch.empty_like(batch.lse))
        load_kernel("triton_decode", num_sms=pretended).launch(other, make_partials(sms(), CUDA))
        results.append(other)
    out, lse = expected(batch)
    for result in results:
        torch.testing.assert_close(result.out.cpu().double(), out, rtol=2**-7, atol=8e-3)
        torch.testing.assert_close(
            result.lse.cpu().double(), lse * math.log(2.0), rtol=1e-4, atol=1e-3
        )
