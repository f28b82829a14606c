"""Prefill from an fp8 cache with its keys widened, on the CPU with a stand-in for the libraries."""

import math
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
import test_gather  # noqa: E402
from backend_engine import engine, make_impl  # noqa: E402
from indexer_batches import common_metadata  # noqa: E402
from test_gather import poison, worst  # noqa: E402, F401

from release_marks import serves_hopper  # noqa: E402
from vllm_dcp_mla import combine_partials, kernel_choice  # noqa: E402
from vllm_dcp_mla.selftest.batch import (  # noqa: E402
    Shape,
    chosen_keys,
    expected_output,
    make_batch,
    shard_cache,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("cpu_vllm", "no_buffers"),
    serves_hopper,
]
HEADS, SCALE, SEED, CPU = 8, 0.05, 5, torch.device("cpu")
#: A decode, prefills of whom the third has one block, and the last ranks none.
SHAPE = Shape("s", (70, 400, 9, 90, 1), (1, 20, 9, 10, 1), 1, HEADS, 16, "fp8_e4m3", topk=128)


class Library:
    """A kernel that reads bf16 only, as those that vLLM ships."""

    name, lse_base, clears_empty_rows = "flashmla", "e", True

    def __init__(self, ours):
        self.ours, self.launched = ours, []

    def supports(self, shape):
        return None if shape.cache_dtype == torch.bfloat16 else "it reads bf16"

    def launch(self, batch, buffers):
        assert batch.cache_rows.dtype == torch.bfloat16
        assert batch.cache_scale == 1.0
        self.launched.append(len(batch.query))
        self.ours.launch(batch, buffers)


@pytest.fixture
def library(monkeypatch):
    """A library's kernel for steps of 8 tokens and more, which pays at once."""
    from vllm_dcp_mla.backends import hopper, hopper_kernels
    from vllm_dcp_mla.kernels.triton_decode import TritonDecodeKernel

    made = Library(TritonDecodeKernel(4, 64))

    def load(name, **_):
        if name == "flash_attn3":
            raise ImportError("not here")
        return made if name == "flashmla" else TritonDecodeKernel(4, 64)

    monkeypatch.setattr(hopper_kernels, "load_kernel", load)
    for module in (hopper, kernel_choice):
        monkeypatch.setattr(module, "MANY_TOKENS", 8)
    monkeypatch.setattr(kernel_choice, "_KEYS_PER_STEP", 0)
    monkeypatch.setattr(kernel_choice, "_KEYS_PER_ROW", 0)
    table = (
        kernel_choice.Preference(1 << 62, 1 << 62, 7, "triton_decode"),
        kernel_choice.Preference(1 << 62, 1 << 62, 1 << 62, "flashmla"),
        kernel_choice.Preference(1 << 62, 1 << 62, 1 << 62, "triton_decode"),
    )
    monkeypatch.setattr(kernel_choice, "PREFERENCES", table)
    return made


def backend():
    from vllm_dcp_mla.backends.hopper import DcpFlashAttnMLASparseBackend

    return DcpFlashAttnMLASparseBackend


class Rank:
    """A rank of a DCP group without PCP."""

    def __init__(self, rank, dcp, num_rows, shape=SHAPE, cache_dtype="fp8_e4m3", settings=None):
        from vllm_dcp_mla.backends.wide_metadata import WideStep, plan_widening

        self.shape, self.batch = shape, make_batch(shape, SEED, quantizes_query=False)
        self.cache, table = shard_cache(shape, self.batch, rank, dcp, SEED)
        with engine(dcp=dcp, settings=settings or {"kernel": "auto"}) as config:
            self.impl = make_impl(backend(), config, cache_dtype=cache_dtype)
        self.impl.dcp_rank = rank
        starts = torch.tensor([0, *shape.query_lens], dtype=torch.int32).cumsum(0).int()
        common = SimpleNamespace(
            num_reqs=len(shape.seq_lens),
            query_start_loc_cpu=starts,
            seq_lens_cpu_upper_bound=torch.tensor(shape.seq_lens, dtype=torch.int32),
        )
        self.metadata = SimpleNamespace(
            gather=None,
            wide=None,
            num_decodes=shape.num_decodes,
            num_decode_tokens=int(starts[shape.num_decodes]),
            block_size=64,
            topk_tokens=shape.topk,
            block_table=table,
            cp_kv_cache_interleave_size=shape.interleave,
            req_id_per_token=torch.tensor(self.batch.token_request, dtype=torch.int32),
        )
        chunks = plan_widening(
            common, self.metadata, num_rows, decode_query_len=1, dcp=dcp, device=CPU
        )
        memory = torch.full((num_rows // 64, 64, 576), math.nan, dtype=torch.bfloat16)
        self.metadata.wide = WideStep(memory, chunks) if chunks else None
        topk = torch.full((shape.num_tokens, shape.topk), -1, dtype=torch.int32)
        for token, keys in enumerate(chosen_keys(shape, self.batch)):
            topk[token, : len(keys)] = keys.int()
        self.impl.topk_indices_buffer = topk
        self.layer = SimpleNamespace(_q_scale_float=1.0, _k_scale_float=self.batch.key_scale)

    def forward(self):
        return self.impl.forward_mqa(self.batch.query, self.cache, self.metadata, self.layer)


@pytest.mark.parametrize("dcp", [2, 8])
@pytest.mark.parametrize(
    ("num_rows", "launched"),
    [
        (1 << 12, {2: [40], 8: [40]}),  # all of them in one copy
        (256, {2: [20, 20], 8: [40]}),  # and in two
        (192, {2: [20], 8: [39]}),  # what does not fit, or is left alone, stays where it is
    ],
)
def test_ranks_agree_with_float64_whatever_fits(library, dcp, num_rows, launched):
    outs, lses = [], []
    for number in range(dcp):
        rank = Rank(number, dcp, num_rows)
        library.launched.clear()
        out, lse = rank.forward()
        outs.append(out.double())
        lses.append(lse.double())
        assert library.launched == launched[dcp]
    merged, _ = combine_partials(torch.stack(outs), torch.stack(lses), "e")
    assert worst(merged, expected_output(SHAPE, rank.batch, SCALE)) < 0.015


def test_kernels_of_both_dtypes_are_named_and_what_is_launched_is_warmed(library):
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    from vllm_dcp_mla.kernels import finish, spread, widen

    found = {}
    for cache_dtype in ("fp8_e4m3", "bfloat16"):
        with engine(settings={"kernel": "auto"}) as config:
            config.kernel_config.enable_jit_warmup = True
            registry = JitWarmupRegistry(config)
            with registry.activate():
                impl = make_impl(backend(), config, cache_dtype=cache_dtype)
        assert impl.kernel_names == ("triton_decode", "flashmla")
        found[cache_dtype] = set(registry._registrations)
    widening = {widen.WIDEN_KERNEL, widen.REMAP_KERNEL}
    assert widening <= found["fp8_e4m3"]
    assert not widening & found["bfloat16"]
    assert all(finish.FINISH_KERNEL in kernels for kernels in found.values())
    assert spread.SPREAD_KERNEL in found["bfloat16"]
    assert spread.SPREAD_KERNEL not in found["fp8_e4m3"], "so many tokens are not split"


@pytest.mark.parametrize(
    ("settings", "cache_dtype", "widens"),
    [
        ({"kernel": "auto"}, "fp8_e4m3", True),
        ({"kernel": "auto"}, "bfloat16", False),
        ({"kernel": "triton_decode"}, "fp8_e4m3", False),
    ],
)
def test_only_where_a_library_would_read_them(library, settings, cache_dtype, widens):
    assert Rank(0, 2, 256, settings=settings, cache_dtype=cache_dtype).impl.widens_keys is widens


def test_without_libraries_the_cache_is_attended():
    assert not Rank(0, 2, 256).impl.widens_keys


def test_too_few_keys_do_not_pay(library, monkeypatch):
    monkeypatch.setattr(kernel_choice, "_KEYS_PER_STEP", 1 << 16)
    assert Rank(0, 2, 1 << 12).metadata.wide is None


def test_prefixes_that_requests_share(library):
    """Two prefills of one context, whose first blocks are the same."""
    shape = Shape("s", (300, 300), (9, 9), 0, HEADS, 1, "fp8_e4m3", topk=128)
    one, two = Rank(0, 2, 1 << 12, shape), Rank(0, 2, 1 << 12, shape)
    keys = two.cache[two.metadata.block_table[0, :2].long()]
    for rank in (one, two):
        table = rank.metadata.block_table
        rank.cache[table[1, :2].long()] = keys
    two.metadata.block_table[1, :2] = two.metadata.block_table[0, :2]
    assert torch.equal(one.forward()[0], two.forward()[0])
    assert library.launched == [18, 18]


@pytest.mark.parametrize("limit", [test_gather.FEW, 1 << 24])
@pytest.mark.parametrize("pages", [1, 64])
def test_gathered_keys_are_widened_where_they_fit(library, monkeypatch, limit, pages):
    from vllm_dcp_mla.backends.wide_metadata import WideStep

    monkeypatch.setitem(test_gather.CLASSES, "sm90", (*test_gather.CLASSES["sm90"][:2], "auto"))
    shape = test_gather.with_cache(test_gather.SHAPE, "fp8_e4m3")
    rank = test_gather.Rank("sm90", limit=limit, shape=shape)
    memory = torch.full((pages, 64, 576), math.nan, dtype=torch.bfloat16)
    rank.metadata.wide = WideStep(memory, one_block=torch.zeros(1, dtype=torch.int32))
    read = []
    attend = rank.impl._attend_range
    rank.impl._attend_range = lambda part, *a, **kw: (
        read.append((part.keys.dtype, kw["with_lse"])) or attend(part, *a, **kw)
    )
    out, lse = rank.forward()
    assert worst(out[1:], rank.expected()[1:, :HEADS]) < 0.015
    assert lse.shape == (1, HEADS)
    assert bool(library.launched) is (pages == 64)
    # Of a range of a request an LSE is wanted. Its later ones are launched a few tokens at a time,
    # and for keys of bf16 only kernels for many are warmed.
    assert any(ranged for _, ranged in read) is (limit == test_gather.FEW)
    for dtype, ranged in read:
        assert (dtype == torch.bfloat16) is (pages == 64 and not ranged)


@contextmanager
def building(cache_dtype="fp8_e4m3"):
    """vLLM's builder for layers of ours, in an engine of DCP 2."""
    from vllm.v1.attention.ops.dcp import MLADCPManager
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    module = "vllm.model_executor.layers.attention.sparse_mla_attention"
    with (
        engine(dcp=2, max_tokens=1024, settings={"kernel": "auto"}) as config,
        mock.patch(f"{module}.get_dcp_group", lambda: SimpleNamespace(world_size=2)),
    ):
        layer = SimpleNamespace(
            prefill_backend=None,
            dcp_manager=MLADCPManager.__new__(MLADCPManager),
            impl=make_impl(backend(), config, cache_dtype=cache_dtype),
        )
        config.compilation_config.static_forward_context["l"] = layer
        spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
        yield backend().get_builder_cls()(spec, ["l"], config, CPU)


@pytest.mark.parametrize(
    ("queries", "tokens"),
    [
        ([1, 1, 1], []),
        # vLLM counts these among the decodes, the last two as prefills.
        ([1, 100, 1, 90], [slice(1, 192)]),
        ([1, 1, 257, 300], [slice(2, 559)]),
        ([2, 2], [slice(0, 4)]),
        ([7], []),  # fewer than a library takes
        ([1] * 200, []),  # more than it takes, and CUDA graphs hold them
    ],
)
def test_prefills_are_widened_whatever_vllm_calls_them(library, monkeypatch, queries, tokens):
    from vllm_dcp_mla.backends import wide_metadata

    most = 8 if queries == [7] else 4
    real = kernel_choice.widens
    monkeypatch.setattr(wide_metadata, "widens", lambda n, *sizes: n >= most and real(99, *sizes))
    with building() as made:
        rows = len(made.chunked_prefill_workspace)
        common = common_metadata([q + 130 for q in queries], queries, len(queries), 0, 2)
        wide = made.build(0, common).wide
    assert [chunk.tokens for chunk in wide.chunks] == tokens if wide else tokens == []
    if wide:
        assert wide.memory.shape == (rows // 64, 64, 576)
        assert wide.memory.data_ptr() == made.chunked_prefill_workspace.data_ptr()
        (chunk,) = wide.chunks
        first = next(n for n, q in enumerate(queries) if q > 1)
        blocks = [math.ceil(math.ceil((q + 130) / 2) / 64) for q in queries[first:]]
        assert chunk.owners.bincount().tolist() == blocks
        assert chunk.owners.tolist() == sorted(chunk.owners.tolist())
        assert chunk.firsts.tolist() == [sum(blocks[:n]) for n in range(len(blocks))]
        assert not wide.moved(9).any(), "whatever block is asked for, its place is one of the copy"
        assert torch.equal(chunk.table, common.block_table_tensor[first:])


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8_e4m3"])
def test_where_nothing_is_widened_the_metadata_is_stocks(cache_dtype):
    with building(cache_dtype) as made:
        assert made.build(0, common_metadata([900], [400], 0, 0, 2)).wide is None


def built(dense=False, widens=True, pcp=1):
    """What the builder adds to stock's metadata of a step with a prefill."""
    from vllm_dcp_mla.backends import gather_metadata, wide_metadata

    class Stock:
        def __init__(self):
            self.layer_names, self.device = ("l",), CPU
            self.use_pcp, self.dcp_world_size = pcp > 1, 2
            self.cp_kv_cache_interleave_size = 1
            self.chunked_prefill_workspace = torch.empty(1000, 576, dtype=torch.bfloat16)
            impl = SimpleNamespace(
                widens_keys=widens, gather_plan=None, plan_gather=lambda interleave: None
            )
            layers = {"l": SimpleNamespace(impl=impl)}
            self.vllm_config = SimpleNamespace(
                compilation_config=SimpleNamespace(static_forward_context=layers)
            )

        def build(self, *_):
            prefill = SimpleNamespace(use_dense_mha=dense)
            return SimpleNamespace(num_prefills=1, num_decodes=0, prefill=prefill, wide=None)

    class Builder(wide_metadata.WideKeysBuilderMixin, gather_metadata.GatherBuilderMixin, Stock):
        pass

    with (
        mock.patch.object(wide_metadata, "plan_widening", return_value=["chunk"]) as plan,
        mock.patch.object(gather_metadata, "plan_step") as gather,
    ):
        wide = Builder().build(0, SimpleNamespace(max_query_len=9)).wide
    return wide, plan, gather


def test_where_pcp_gathers_keys_it_is_decided_then():
    gathered, plan, gather = built(pcp=2)
    assert gathered.memory.shape == (15, 64, 576)
    assert gathered.chunks == []
    assert gathered.one_block.tolist() == [0]
    assert not plan.called
    # Of two ranks, as many rows as are widened at a time: a prompt that fits alone is widened in
    # the company of others, too.
    assert gather.call_args.kwargs["most_together"] == 15 * 64 // 2
    assert built(pcp=2, widens=False)[2].call_args.kwargs["most_together"] is None


@pytest.mark.parametrize("changes", [{"dense": True}, {"widens": False}])
def test_dense_prefills_keep_their_memory(changes):
    assert built()[0].chunks == ["chunk"]
    assert built(**changes)[0] is None
