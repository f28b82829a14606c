"""The works on the CPU with a stand-in clock: kernels are interpreted, results are checked."""

import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from bench_stand_ins import Clock, workbench  # noqa: E402

from release_marks import serves_hopper  # noqa: E402
from vllm_dcp_mla.bench import check, inputs  # noqa: E402
from vllm_dcp_mla.bench.rows import Row  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm"), serves_hopper]
CPU = torch.device("cpu")


@pytest.fixture
def cache():
    torch.manual_seed(1)
    return inputs.make_cache("bf16", CPU, rows=1 << 10)


@pytest.fixture
def narrow(monkeypatch):
    """Selections of 128 slots."""
    from vllm_dcp_mla.bench.works import attention, step

    real = inputs.make_sets
    monkeypatch.setattr(attention, "make_sets", lambda *arguments: real(*arguments, width=128))
    monkeypatch.setattr(step, "TOPK", 128)


def stand_in(monkeypatch, spoil=lambda batch: None, **attributes):
    """``load_kernel`` with one kernel that computes in float64, and may be wrong."""
    from vllm_dcp_mla.bench.works import attention

    class Kernel:
        name, lse_base, clears_empty_rows = "stand_in", "e", False

        def supports(self, shape):
            return None

        def launch(self, batch, buffers):
            out, lse = check.attend_float64(batch, torch.arange(len(batch.query)))
            held = batch.counts > 0  # as FlashMLA, which leaves rows without keys
            batch.out[held] = out[held].bfloat16()
            batch.lse[held] = lse[held].float()
            spoil(batch)

    monkeypatch.setattr(attention, "load_kernel", lambda name, **_: Kernel())


def test_attention_rows_of_our_kernel(cache, narrow):
    from vllm_dcp_mla.bench.works import attention

    rows = attention.at_shape(workbench(), "attention", cache, 3, 16, 60, ("triton_decode",))
    (row,) = rows
    assert row.problem is None
    assert row.shape == "3 tokens, 60 rows, 16 heads, bf16"
    assert row.sizes == {"tokens": 3, "rows": 60, "heads": 16, "cache": "bf16"}
    # Two sets a pass, as many as the smallest number: 100 us a pass.
    assert row.us == 50
    assert row.floor_us > 0


def test_what_the_backend_does_after_a_launch_belongs_to_it(cache, narrow, monkeypatch):
    from vllm_dcp_mla.bench.works import attention

    stand_in(monkeypatch)
    (row,) = attention.at_shape(workbench(), "attention", cache, 3, 4, 60, ("any",))
    assert row.problem is None
    assert row.us is not None


def test_a_wrong_kernel_is_said_and_not_timed(cache, narrow, monkeypatch):
    from vllm_dcp_mla.bench.works import attention

    clock = Clock()
    stand_in(monkeypatch, spoil=lambda batch: batch.out.mul_(1.1))
    (row,) = attention.at_shape(workbench(clock), "attention", cache, 3, 4, 60, ("any",))
    assert "relative error" in row.problem
    assert row.us is None
    assert clock.turns == []


def test_a_kernel_that_refuses_or_is_not_here_is_said(cache, narrow, monkeypatch):
    from vllm_dcp_mla.bench.works import attention

    def refuse(batch):
        raise RuntimeError("out of luck\nand more")

    stand_in(monkeypatch, spoil=refuse)
    (row,) = attention.at_shape(workbench(), "attention", cache, 1, 4, 60, ("any",))
    assert (row.us, row.problem) == (None, None)
    assert row.note == "did not run: RuntimeError: out of luck"
    monkeypatch.undo()
    rows = attention.at_shape(workbench(), "attention", cache, 1, 4, 60, ("flashmla",))
    assert rows[0].note.startswith("not here: ")


def test_every_limit_of_a_split_gives_the_same(cache, monkeypatch):
    from vllm_dcp_mla.bench.works import attention, split

    stand_in(monkeypatch)
    kernel = attention.load_kernel("any")
    (batch,) = inputs.make_sets(cache, 7, 2, 20, 1, width=32)
    buffers = attention.make_buffers(workbench())
    for limit in (2, 7, 100):
        check.poison(batch)
        split._launches(kernel, batch, buffers, limit)
        assert check.problem_with(batch, "e") is None


def test_the_smallest_limit_that_costs_little():
    from vllm_dcp_mla.bench.works.split import verdicts

    rows = [
        Row("split", "", "k", us=us, sizes={"tokens": 8192, "tokens_per_launch": limit})
        for limit, us in ((8192, 100.0), (4096, 102.0), (1024, 121.0))
    ]
    (said,) = verdicts(rows)
    assert said.startswith("k, 8,192 tokens: time over one launch's by tokens a launch: ")
    assert said.endswith("1,024: 1.210, 4,096: 1.020, 8,192: 1.000; from 4,096 on within 3%.")
    assert verdicts(rows[1:]) == []


@pytest.fixture
def small_step(monkeypatch, narrow):
    from vllm_dcp_mla.bench.works import step

    monkeypatch.setattr(step, "BLOCKS", 32)
    monkeypatch.setattr(step, "_CONTEXT", 2048)
    monkeypatch.setattr(step, "HEADS", 16)
    torch.manual_seed(5)
    return step


def test_our_step_from_positions_to_what_is_sent(small_step):
    for name in inputs.CACHES:
        rows, scale = small_step.random_cache(name, CPU)
        chosen = small_step._select(3, 1, CPU)
        attend = small_step.ours(workbench(), rows, scale, chosen)
        version = small_step.Version(attend, rows, scale, 1152)
        assert small_step.problem_of(version, chosen) is None
        sent = small_step._step(version, chosen.queries[0], chosen.topk[0])
        assert sent.shape == (4, 3, 4, 514)
        wrong = small_step.Version(attend, rows * 1.1 if scale == 1 else rows, scale * 1.2, 1152)
        assert small_step.problem_of(wrong, chosen) is not None


@pytest.fixture
def stock_kernel(monkeypatch):
    """FlashMLA's place is taken by float64 over what its cache holds; all else is stock's."""
    from vllm.v1.attention.backends.mla import flashmla_sparse
    from vllm.v1.attention.ops import flashmla

    from vllm_dcp_mla.bench.works import step

    def kernel(*, q, k_cache, indices, softmax_scale, head_dim_v, is_fp8_kvcache, **_):
        assert k_cache.shape[1:] == (64, 1, 656)
        assert is_fp8_kvcache
        rows = unpack(k_cache)
        out = torch.full((*q.shape[:3], head_dim_v), math.nan)
        lse = torch.full((1, q.shape[2], q.shape[1]), math.inf)
        for token, index in enumerate(indices[0]):
            keys = rows[index[index >= 0].long()]
            if len(keys):
                scores = q[0, token].double() @ keys.T * softmax_scale
                lse[0, :, token] = torch.logsumexp(scores, -1)
                out[0, token] = torch.softmax(scores, -1) @ keys[:, :512]
        return out.bfloat16(), lse

    monkeypatch.setattr(flashmla_sparse, "flash_mla_with_kvcache", kernel, raising=False)
    monkeypatch.setattr(
        flashmla, "get_mla_metadata", lambda: (SimpleNamespace(), None), raising=False
    )
    return step


def unpack(cache):
    """The values of fp8_ds_mla rows, ``[R, 576]`` float64, from what vLLM documents of them."""
    rows = cache.reshape(-1, 656)
    latent = rows[:, :512].view(torch.float8_e4m3fn).double()
    scales = rows[:, 512:528].contiguous().view(torch.float32).repeat_interleave(128, 1)
    rotary = rows[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat((latent * scales, rotary), 1)


def test_stocks_step_runs_its_own_code(small_step, stock_kernel):
    packed, rows = small_step.random_ds_mla_cache(CPU, 32)
    chosen = small_step._select(3, 1, CPU)
    version = small_step.Version(small_step.stock(packed, chosen), rows, 1.0, 656)
    assert small_step.problem_of(version, chosen) is None


@pytest.fixture
def small_prefill(small_step, stock_kernel, monkeypatch):
    from vllm_dcp_mla.bench.works import prefill

    monkeypatch.setattr(prefill, "BLOCKS", 32)
    monkeypatch.setattr(prefill, "HEADS", 16)
    monkeypatch.setattr(prefill, "TOPK", 128)
    monkeypatch.setattr(prefill, "_QUICK_TOKENS", (3, 5))
    monkeypatch.setattr(prefill, "_QUICK_CONTEXTS", (2048,))
    return prefill


def test_a_prefill_from_every_cache_and_from_widened_keys(small_prefill):
    run = workbench()
    rows = list(small_prefill.run(run))
    assert [r.problem or r.note for r in rows] == [None] * 8
    assert {r.provider for r in rows} >= {small_prefill.WIDENED, small_prefill.AS_CACHED}
    assert len(run.remarks) == 2
    assert all("over stock's" in said for said in run.remarks)


def test_the_wrong_choice_of_a_prefill_is_said(small_prefill):
    def rows(tokens, as_cached, widened):
        for provider, us in (("fp8_e4m3", as_cached), ("fp8_e4m3 widened", widened)):
            sizes = {"tokens": tokens, "context": 131_072, "dcp": 4, "heads": 64}
            yield Row("prefill", f"{tokens} tokens", provider, us, 0.01, sizes=sizes)

    said = small_prefill.where_wrong([*rows(8192, 100, 120), *rows(64, 60, 50), *rows(65, 9, 9)])
    assert said == [
        "prefill, 8192 tokens: widened, 20% behind the other way.",
        "prefill, 64 tokens: not widened, 20% behind the other way.",
    ]


def test_the_step_of_both_from_its_caches_to_its_remarks(small_step, stock_kernel, monkeypatch):
    monkeypatch.setattr(small_step, "_QUICK_TOKENS", (1, 3))
    run = workbench()
    rows = list(small_step.run(run))
    assert [r.problem or r.note for r in rows] == [None] * 6
    assert all(r.us > 0 and r.floor_us > 0 for r in rows)
    assert len(run.remarks) == 2


def test_attention_from_its_caches_to_its_remarks(narrow, monkeypatch):
    from vllm_dcp_mla.bench.works import attention

    real = inputs.make_cache
    monkeypatch.setattr(attention, "make_cache", lambda *a: real(*a, rows=1 << 10))
    monkeypatch.setattr(attention, "_QUICK_TOKENS", (2,))
    monkeypatch.setattr(attention, "QUICK_SHAPES", ((16, 40),))
    rows = list(attention.run(workbench()))
    ours = [r for r in rows if r.provider == "triton_decode"]
    assert [(r.sizes["cache"], r.problem) for r in ours] == [("bf16", None), ("fp8_e4m3", None)]
    assert all(r.us is None and r.note for r in rows if r not in ours)


def test_tilings_from_their_caches_to_their_remarks(narrow, monkeypatch):
    from vllm_dcp_mla.bench.works import tilings

    real = inputs.make_cache
    monkeypatch.setattr(tilings, "make_cache", lambda *a: real(*a, rows=1 << 10))
    monkeypatch.setattr(tilings, "_compile", lambda dtype: None)  # interpreted kernels are not
    monkeypatch.setattr(tilings, "CANDIDATES", tilings.CANDIDATES[:2])
    monkeypatch.setattr(tilings, "_QUICK_TOKENS", (1,))
    monkeypatch.setattr(tilings, "QUICK_SHAPES", ((16, 60),))
    run = workbench()
    rows = list(tilings.run(run))
    assert len(rows) == 2 * len(tilings.CANDIDATES)
    assert [r.problem or r.note for r in rows] == [None] * len(rows)
    assert [line.startswith("Choice(960, Tiling(") for line in run.remarks] == [True] * 2


def test_splits_from_their_cache_to_their_remarks(narrow, monkeypatch):
    from vllm_dcp_mla.bench.works import split

    real_cache, real_sets = inputs.make_cache, inputs.make_sets
    monkeypatch.setattr(split, "make_cache", lambda *a: real_cache(*a, rows=1 << 10))
    monkeypatch.setattr(split, "make_sets", lambda *a: real_sets(*a, width=64))
    for name, value in {
        "TOKENS": (6,), "_QUICK_LIMITS": (2, 4, 8), "_HEADS": 16, "_ROWS": 50,
    }.items():  # fmt: skip
        monkeypatch.setattr(split, name, value)
    run = workbench()
    rows = list(split.run(run))
    assert [r.sizes["tokens_per_launch"] for r in rows] == [2, 4, 6]
    assert [r.problem or r.note for r in rows] == [None] * 3
    assert len(run.remarks) == 1


def test_an_fp8_ds_mla_row_holds_what_is_said(small_step):
    packed, rows = small_step.random_ds_mla_cache(CPU, 2)
    row = packed.view(-1, 656)[77]
    latent = row[:512].view(torch.float8_e4m3fn).float()
    scales = row[512:528].view(torch.float32).repeat_interleave(128)
    torch.testing.assert_close(rows[77, :512].float(), latent * scales, rtol=0, atol=0)
    assert torch.equal(rows[77, 512:], row[528:].view(torch.bfloat16))


def test_ours_over_stocks():
    from vllm_dcp_mla.bench.works.step import ratios

    rows = [Row("step", "s", "vllm_dcp_mla bf16", us=6), Row("step", "s", "stock X", us=10)]
    assert ratios(rows) == ["step, s, over stock's: vllm_dcp_mla bf16 0.60."]


def test_launches_around_the_kernel_are_counted():
    from vllm_dcp_mla.bench.works import launches

    rows = {
        (r.sizes["tokens"], r.provider): r.counted for r in launches.run(workbench(quick=False))
    }
    assert rows[1, "vllm_dcp_mla"]["launches"] < rows[1, "stock"]["launches"]
    for tokens, more in ((8192, 1), (32_768, 7)):
        ours = rows[tokens, "vllm_dcp_mla"]
        assert ours["launches"] == rows[1, "vllm_dcp_mla"]["launches"] + more
        assert ours["workspace_bytes"] == 951_058_432
        assert ours["bytes_around_kernel"] < rows[tokens, "stock"]["bytes_around_kernel"]
        assert rows[tokens, "stock"]["launches"] == rows[1, "stock"]["launches"]
    # Two masks over the results, read and written, and the comparison that makes the mask.
    out, lse, mask = 64 * 512 * 2, 64 * 4, 1
    assert rows[1, "vllm_dcp_mla"]["bytes_around_kernel"] == pytest.approx(
        2 * (out + lse + mask) + 5, abs=16
    )


def test_metadata_of_both_builders_on_the_same_batch():
    from vllm_dcp_mla.bench.engine import Batch
    from vllm_dcp_mla.bench.works import metadata

    for batch in (
        Batch("decode", (70, 900), (1, 1), 2),
        Batch("prefill", (3000,), (1200,), 0),
    ):
        rows = metadata.at_batch(workbench(), batch)
        assert [(r.provider, r.problem) for r in rows] == [("vllm_dcp_mla", None), ("stock", None)]
        assert all(r.us > 0 and r.sizes["time"] == "host" for r in rows)
    assert len(metadata.ratios(rows)) == 1


def test_a_builder_that_lets_rows_see_too_much_is_wrong():
    from vllm_dcp_mla.bench import engine

    batch = engine.Batch("decode", (70, 900), (1, 1), 2)
    decode = SimpleNamespace(seq_lens=torch.tensor([9, 113]))
    found = SimpleNamespace(decode=decode, prefill=None)
    assert engine.wrong_rows(found, batch) is None
    decode.seq_lens[1] += 1
    assert engine.wrong_rows(found, batch) == "row 1 may see 114 keys, 113 are stored here"
    decode.seq_lens = decode.seq_lens[:1]
    assert engine.wrong_rows(found, batch) == "1 rows, 2 tokens"


def test_the_best_tiling_is_said_as_a_line_of_the_table():
    from vllm_dcp_mla.bench.candidates import CANDIDATES
    from vllm_dcp_mla.bench.works.tilings import best_choice
    from vllm_dcp_mla.key_splits import Choice, Tiling  # noqa: F401  (names in what is said)

    sizes = {"tokens": 16, "rows": 512, "heads": 64, "cache": "bf16"}
    rows = [
        Row("tilings", "shape", str(t), us=20.0 - n, sizes=sizes) for n, t in enumerate(CANDIDATES)
    ]
    (line,) = best_choice(rows)
    code, _, comment = line.partition(",  # ")
    assert eval(code) == Choice(16 * 512 * 64, CANDIDATES[-1])
    assert comment == f"shape: {20 - len(CANDIDATES) + 1:.1f} us, 20.0 by default"
    assert best_choice([Row("tilings", "", "x", note="did not run")]) == []


def test_candidates_are_told_apart():
    from vllm_dcp_mla.bench.candidates import CANDIDATES

    assert len({str(t) for t in CANDIDATES}) == len(CANDIDATES)


def test_growth_is_fitted_by_what_it_varies():
    from vllm_dcp_mla.bench.works import growth

    def point(line, units, us, provider="as dispatched", **sizes):
        return Row("growth", "", provider, us=us, sizes={"line": line, "units": units, **sizes})

    rows = [
        *(point("tokens", n, 5 + 0.5 * n, tokens=n, rows=512) for n in (1, 64, 1024)),
        *(point("rows", n, 5 + 64 * n * 0.5 / 512, tokens=64, rows=n) for n in (256, 2048)),
        *(point("ranks", n, 5 + 64 * 2 / n) for n in (1, 2, 8)),
        point("heads", 64, 9.0),
        *(point("context", n, 100 + n / 100, "stock") for n in (1000, 9000)),
    ]
    fits = {(f["line"], f["provider"]): f for f in growth.fitted(rows)}
    assert set(fits) == {
        *((line, "as dispatched") for line in ("tokens", "rows", "ranks")),
        ("context", "stock"),
    }
    assert fits["tokens", "as dispatched"]["per_unit_us"] == pytest.approx(0.5)
    assert fits["ranks", "as dispatched"]["per_unit_us"] == pytest.approx(128)
    assert fits["ranks", "as dispatched"]["unit"] == "1 / ranks"
    assert fits["context", "stock"]["fixed_us"] == pytest.approx(100)
    made = {(e["tokens"], e["dcp"]): e for e in growth.estimated(rows)}
    assert len(made) == 16
    assert made[16, 8]["attention_us"] == pytest.approx(78 * (5 + 16 * 256 * 0.5 / 512), rel=1e-3)
    assert growth.estimated([]) == []


def test_growth_runs_over_the_kernel_that_is_dispatched_to(monkeypatch, narrow):
    from vllm_dcp_mla.bench.works import growth

    real = inputs.make_cache
    monkeypatch.setattr(growth, "make_cache", lambda *a: real(*a, rows=1 << 10))
    for name, value in {
        "TOKENS": (1, 3), "HEADS": (16, 32), "ROWS": (32, 64), "CONTEXTS": (2000, 3000),
        "STEP": 1500, "_HEADS": 16, "_ROWS": 64, "_TOKENS": 2,
    }.items():  # fmt: skip
        monkeypatch.setattr(growth, name, value)
    run = workbench(quick=False)
    rows = list(growth.run(run))
    assert [r.problem for r in rows] == [None] * len(rows)
    assert {r.sizes["line"] for r in rows} == {"tokens", "heads", "rows", "context"}
    assert {r.note for r in rows if r.sizes["line"] == "tokens"} == {"kernel triton_decode"}
    assert {f["line"] for f in run.fits} >= {"tokens", "heads", "rows", "context"}
