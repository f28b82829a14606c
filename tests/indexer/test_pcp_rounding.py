"""Why stock's PCP differs from TP1: an fp8 cache's values are rounded twice, to bf16 and to fp8.

Without PCP, vLLM's fused kernel rounds an index key, and the row of a quantised KV cache, from
float32 to fp8 and writes it. With PCP it writes them as bf16, ranks exchange them, and they are
rounded to fp8 then. A 32nd of all values are so near the middle of two fp8 numbers that bf16 moves
them onto the other side. Neither rounding is nearer to the truth; selections differ by near-ties.
"""

import inspect

import pytest

torch = pytest.importorskip("torch")

TOKENS, DIM, ROPE = 64, 128, 64


@pytest.fixture(scope="module")
def kernels(cpu_vllm):
    from vllm.models.deepseek_v32.common import kernels

    return kernels


def fused(kernels, index_k, dtype):
    """Index keys ``[T, DIM]`` as stock's kernel normalises and rotates them, and latent rows."""
    rows = len(index_k)
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    angles = torch.arange(rows)[:, None] * 1e6 ** -(torch.arange(0, ROPE, 2) / ROPE)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    keys = torch.empty(rows, DIM, dtype=dtype)
    latent = torch.empty(rows, 512, dtype=dtype)
    kernels.fused_norm_rope(
        torch.arange(rows),
        draw(rows, 64).bfloat16(),
        torch.ones(64).bfloat16(),
        1e-6,
        draw(rows, 512).bfloat16(),
        torch.ones(512).bfloat16(),
        1e-6,
        draw(rows, ROPE).bfloat16(),
        table,
        index_k[:, :DIM],
        1 + 0.1 * draw(DIM),
        0.1 * draw(DIM),
        1e-6,
        table,
        torch.empty(rows, 512, dtype=torch.int32),
        index_rope_interleave=True,
        kv_c_out=latent,
        k_pe_out=torch.empty(rows, ROPE).bfloat16(),
        index_k_out=keys,
    )
    return keys, latent


def to_fp8(keys):
    """fp8 keys and their power-of-two scales, as stock's own quantiser makes them of bf16."""
    scales = torch.exp2((keys.float().abs().amax(-1, keepdim=True) / 448).log2().ceil())
    return (keys.float() / scales).to(torch.float8_e4m3fn).float(), scales


@pytest.mark.vllm
def test_keys_that_pcp_exchanges_are_rounded_already(kernels):
    from vllm.models.deepseek_v32.attention import DeepseekV32Attention

    source = inspect.getsource(DeepseekV32Attention.forward)
    assert "index_k_out = torch.empty_like(index_k) if self.use_pcp else None" in source, (
        "stock exchanges other keys now: measure again, and drop this test if it is float32 or fp8"
    )
    raw = torch.randn(TOKENS, DIM + 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact, _ = fused(kernels, raw, torch.float32)
    exchanged, _ = fused(kernels, raw, torch.empty_like(raw[:, :DIM]).dtype)
    assert exchanged.dtype == torch.bfloat16
    torch.testing.assert_close(exchanged.float(), exact, rtol=2**-7, atol=0)
    once, scales = to_fp8(exact)
    twice, twice_scales = to_fp8(exchanged)
    assert torch.equal(scales, twice_scales)
    moved = (once != twice).float().mean()
    # A 32nd where bf16 rounds to nearest; Triton's interpreter truncates, which moves a 16th.
    assert 0.02 < moved < 0.08


@pytest.mark.vllm
def test_rows_of_an_fp8_cache_that_pcp_exchanges_are_rounded_already(kernels):
    from vllm.models.deepseek_v32.attention import DeepseekV32Attention

    source = inspect.getsource(DeepseekV32Attention.forward)
    assert "kv_c_out = torch.empty_like(kv_c)" in source, "stock exchanges other rows now"
    raw = torch.randn(TOKENS, DIM + 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, exact = fused(kernels, raw, torch.float32)
    _, exchanged = fused(kernels, raw, torch.bfloat16)
    once, twice = (rows.to(torch.float8_e4m3fn).float() for rows in (exact, exchanged))
    assert 0.02 < (once != twice).float().mean() < 0.08
    errors = [(rows - exact).square().mean().sqrt() for rows in (once, twice)]
    assert errors[1] == pytest.approx(errors[0].item(), rel=0.02)


def test_a_value_that_is_rounded_twice_is_no_worse():
    exact = torch.randn(4000, DIM, generator=torch.Generator().manual_seed(0))
    once, scales = to_fp8(exact)
    twice, twice_scales = to_fp8(exact.bfloat16())
    same = (scales == twice_scales).flatten()
    assert same.float().mean() > 0.99
    moved = (once != twice)[same].float().mean()
    assert moved == pytest.approx(1 / 32, rel=0.1)
    errors = [
        (keys * scale - exact)[same].square().mean().sqrt()
        for keys, scale in ((once, scales), (twice, twice_scales))
    ]
    assert errors[1] == pytest.approx(errors[0].item(), rel=0.01)


def test_another_selection_is_as_good():
    """Scores of 32 heads over 1,500 keys: half a percent of 512 keys differ, recall does not."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    common = draw(8, 1, DIM)
    q, k, topk = 0.6 * draw(8, 32, DIM) + 0.8 * common, draw(1500, DIM), 512

    def selected(keys, queries):
        best = torch.einsum("thd,sd->ths", queries, keys).relu().sum(1).topk(topk, -1).indices
        return [set(row.tolist()) for row in best]

    def share(some, others):
        return sum(len(a & b) for a, b in zip(some, others, strict=True)) / (len(some) * topk)

    q8 = torch.mul(*to_fp8(q))
    truth = selected(k, q)
    once, twice = (selected(torch.mul(*to_fp8(keys)), q8) for keys in (k, k.bfloat16()))
    assert 0.985 < share(once, twice) < 0.999
    assert share(once, truth) == pytest.approx(share(twice, truth), abs=0.003)
    assert share(once, truth) < share(once, twice), "fp8 itself costs more"
