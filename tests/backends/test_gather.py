"""Prefill rows under PCP with DCP, in the SM100 and the SM90 class, on one rank.

The exchange is answered from the other ranks' caches; memory that nobody wrote is NaN.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
from backend_engine import engine, make_impl  # noqa: E402

from release_marks import gathers_here  # noqa: E402
from vllm_dcp_mla import device_buffer  # noqa: E402
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
    gathers_here,
]

HEADS = 8  # of one of the 8 TP ranks that ``engine`` makes
SCALE = 0.05
SEED = 3
#: A decode, a prefill with context, a short prompt that is not cut, a longer one.
SHAPE = Shape("s", (70, 400, 3, 90), (1, 9, 3, 20), 1, 64, interleave=16, topk=128)
CLASSES = {
    "sm100": ("trtllm", "DcpFlashInferMLASparseBackend", "reference"),
    "fa4": ("flash_attn_4", "DcpFlashAttnMLASparseFA4Backend", "reference"),
    "sm90": ("hopper", "DcpFlashAttnMLASparseBackend", "triton_decode"),
}


@pytest.fixture(params=CLASSES)
def kind(request):
    return request.param


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)


def settle(impl, config, dcp, interleave):
    """What a builder of ours does when vLLM has made it."""
    from vllm_dcp_mla.backends.gather_metadata import GatherBuilderMixin

    class Stock:
        use_pcp, dcp_world_size, cp_kv_cache_interleave_size = True, dcp, interleave
        layer_names, vllm_config = ("l",), config

    config.compilation_config.static_forward_context["l"] = SimpleNamespace(impl=impl)
    type("Builder", (GatherBuilderMixin, Stock), {})()


class Rank:
    """Rank 0 of a PCP2 engine whose batch is not partitioned: it has all rows."""

    def __init__(self, kind, dcp=2, limit=1 << 24, shape=SHAPE, loaded=None):
        """``loaded``: the interleave when the model was loaded, where that is another."""
        from importlib import import_module

        from vllm_dcp_mla.backends.gather_metadata import plan_step

        module, name, kernel = CLASSES[kind]
        backend = getattr(import_module(f"vllm_dcp_mla.backends.{module}"), name)
        self.shape, self.batch = shape, make_batch(shape, SEED, quantizes_query=module != "hopper")
        self.shards = [shard_cache(shape, self.batch, r, dcp, SEED) for r in range(dcp)]
        settings = {"kernel": kernel, "gather_limit_bytes": limit}
        with engine(dcp=dcp, pcp=2, settings=settings) as config:
            config.parallel_config.cp_kv_cache_interleave_size = loaded or shape.interleave
            self.impl = make_impl(backend, config, cache_dtype=shape.cache_dtype)
            self.loaded_plan = self.impl.gather_plan
            settle(self.impl, config, dcp, shape.interleave)
        starts = torch.tensor([0, *shape.query_lens], dtype=torch.int32).cumsum(0).int()
        lengths = torch.tensor(shape.seq_lens, dtype=torch.int32)
        common = SimpleNamespace(
            num_reqs=len(lengths), req_idx=None, query_start_loc_cpu=starts,
            seq_lens_cpu_upper_bound=lengths, dcp_local_seq_lens_cpu_upper_bound=None,
        )  # fmt: skip
        step = plan_step(
            common, shape.num_decodes, self.impl.gather_plan,
            dcp=dcp, interleave=shape.interleave, device=torch.device("cpu"),
        )  # fmt: skip
        self.metadata = SimpleNamespace(
            gather=step, wide=None, num_decode_tokens=int(starts[shape.num_decodes]), block_size=64,
            block_table=self.shards[0][1], cp_kv_cache_interleave_size=shape.interleave,
            req_id_per_token=torch.tensor(self.batch.token_request, dtype=torch.int32),
        )  # fmt: skip
        topk = torch.full((shape.num_tokens, shape.topk), -1, dtype=torch.int32)
        for token, keys in enumerate(chosen_keys(shape, self.batch)):
            topk[token, : len(keys)] = keys.int()
        self.impl.topk_indices_buffer = topk
        self.layer = SimpleNamespace(
            _q_scale_float=self.batch.query_scale, _k_scale_float=self.batch.key_scale
        )
        self.sent, self.launches = [], []

    def _exchange(self, out, own, group):
        """What the other ranks would send: the same rows of their caches."""
        count = len(own)
        chunk = self.metadata.gather.chunks[len(self.sent)]
        for rank, (cache, table) in enumerate(self.shards):
            if rank:
                rows = replace(self.metadata.gather, _cache_rows={}).cache_rows(table, 64, 64)
                words = cache.view(-1, cache.shape[-1]).view(out.dtype)
                out[rank * count :][:count] = words[rows[chunk.rows].long()]
        self.sent.append(count)

    def forward(self, query=None, heads=HEADS):
        """The implementation on the first heads of the batch's query."""
        launch = self.impl._attend

        def noted(*args, **kwargs):
            out, lse = launch(*args, **kwargs)
            self.launches.append((len(args[0]), lse is not None))
            return out, lse

        ranks = SimpleNamespace(rank_in_group=1, device_group=None)
        with (
            mock.patch.object(torch.distributed, "all_gather_into_tensor", self._exchange),
            mock.patch("vllm_dcp_mla.backends.gather.get_dcp_group", lambda: ranks),
            mock.patch("vllm_dcp_mla.backends.gather.get_tp_group", lambda: ranks),
            mock.patch.object(self.impl, "_attend", noted),
        ):
            query = self.batch.query[:, :heads].contiguous() if query is None else query
            return self.impl.forward_mqa(query, self.shards[0][0], self.metadata, self.layer)

    def expected(self):
        return expected_output(self.shape, self.batch, SCALE)


def worst(out, wanted):
    assert torch.isfinite(out).all()
    return float((out.double() - wanted).norm(dim=-1).div(wanted.norm(dim=-1)).max())


#: Bytes that hold 128 bf16 rows of both ranks, and the results of a few tokens.
FEW = (128 + 64) * 1152


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("limit", [FEW, 1 << 24])
def test_prefill_rows_attend_everything_and_decodes_leave_with_an_lse(kind, cache_dtype, limit):
    if kind == "fa4" and cache_dtype != "bfloat16":
        pytest.skip("FlashAttention 4 reads a bf16 cache")
    rank = Rank(kind, limit=limit, shape=with_cache(SHAPE, cache_dtype))
    out, lse = rank.forward()
    assert worst(out[1:], rank.expected()[1:, :HEADS]) < 0.015
    assert lse.shape == (1, HEADS)
    assert torch.isfinite(lse).all()
    assert len(rank.sent) == len(rank.metadata.gather.chunks)
    assert any(not c.plan.whole for c in rank.metadata.gather.chunks) is (limit == FEW)


def with_cache(shape, cache_dtype):
    return replace(shape, cache_dtype=cache_dtype)


def test_what_fits_is_one_launch_without_lse_and_one_exchange(kind):
    rank = Rank(kind)
    rank.forward()
    assert rank.launches == [(1, True), (32, False)]
    assert rank.sent == [sum(c.plan.rows_per_rank for c in rank.metadata.gather.chunks)]


def test_ranges_are_launched_for_as_many_tokens_as_have_room_for_results(kind):
    rank = Rank(kind, limit=FEW)
    plan = rank.impl.gather_plan
    rank.forward()
    assert plan.merge_tokens == 3  # an eighth of the limit, of 8 KiB a token
    later = [n for n, lse in rank.launches[1:] if lse and n <= 3]
    ranges = [c for c in rank.metadata.gather.chunks if not c.plan.whole and c.plan.start]
    rows = [c.tokens.stop - c.tokens.start for c in ranges]
    assert len(later) == sum(-(-n // 3) for n in rows)
    assert sum(later) == sum(rows)


def test_without_decodes_the_lse_has_no_rows(kind):
    shape = Shape("s", (400, 90), (9, 20), 0, 64, interleave=16, topk=128)
    rank = Rank(kind, shape=shape)
    out, lse = rank.forward()
    assert lse.shape == (0, HEADS)
    assert worst(out, rank.expected()[:, :HEADS]) < 0.015


def test_a_rank_without_rows_takes_part_in_every_exchange(kind):
    rank = Rank(kind, limit=FEW)
    step = rank.metadata.gather
    step.chunks = [
        replace(c, tokens=slice(1, 1), request_of_token=c.request_of_token[:0]) for c in step.chunks
    ]
    out, lse = rank.forward(rank.batch.query[:1, :HEADS].contiguous())
    assert len(rank.sent) == len(step.chunks)
    assert rank.launches == [(1, True)]
    assert (out.shape[0], lse.shape[0]) == (1, 1)


def test_where_dcp_spans_tp_prefill_rows_have_this_ranks_heads(kind):
    """TP8 PCP2 DCP16: decode rows come with the heads of all 8 TP ranks; this is the second."""
    rank = Rank(kind, dcp=16)
    out, lse = rank.forward(heads=64)
    mine = slice(HEADS, 2 * HEADS)
    assert (out.shape[1], lse.shape) == (64, (1, 64))
    assert torch.isfinite(out[:1]).all()
    assert worst(out[1:, mine], rank.expected()[1:, mine]) < 0.015
    assert rank.launches[0] == (1, True)


def test_two_parts_of_a_query_are_packed(kind):
    rank, whole = Rank(kind), Rank(kind)
    query = rank.batch.query[:, :HEADS]
    out, _ = rank.forward((query[..., :512], query[..., 512:]))
    assert torch.equal(out, whole.forward()[0])


def test_steps_without_prefills_are_stocks(kind):
    rank = Rank(kind)
    rank.metadata.gather = None
    out, lse = rank.forward(rank.batch.query[:1, :HEADS].contiguous())
    assert rank.sent == []
    assert (out.shape[0], lse.shape) == (1, (1, HEADS))


def test_one_workspace_of_a_device_counted_while_the_model_loads(kind):
    rank = Rank(kind, limit=FEW)
    (workspace,) = device_buffer._GATHERED.values()
    assert workspace.numel() == rank.impl.gather_plan.total_bytes <= FEW
    again = Rank(kind, limit=FEW)
    assert again.impl.gather_plan == rank.impl.gather_plan
    more = Rank(kind, limit=1 << 24)
    assert again.impl._workspace is more.impl._workspace is workspace
    assert more.impl.gather_plan.total_bytes <= FEW


# The first holds 96 rows of both ranks, one turn and a half.
@pytest.mark.parametrize("limit", [FEW + 64 * 1152, 1 << 24])
def test_an_interleave_that_changes_once_the_model_is_loaded(kind, limit):
    """As vLLM does for a KV connector: to whole blocks."""
    rank = Rank(kind, limit=limit, shape=replace(SHAPE, interleave=64), loaded=1)
    plan, loaded = rank.impl.gather_plan, rank.loaded_plan
    assert loaded.rows_per_rank % 64
    assert plan.rows_per_rank % 64 == 0 < plan.rows_per_rank
    (workspace,) = device_buffer._GATHERED.values()
    assert plan.total_bytes <= workspace.numel() == loaded.total_bytes
    out, _ = rank.forward()
    decodes = rank.metadata.num_decode_tokens
    assert worst(out[decodes:], rank.expected()[decodes:, :HEADS]) < 0.015


@pytest.mark.parametrize("pcp", [1, 2])
def test_builders_plan_for_the_interleave_that_they_find(kind, pcp):
    from importlib import import_module

    from vllm.v1.attention.ops.dcp import MLADCPManager
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    module, name, kernel = CLASSES[kind]
    backend = getattr(import_module(f"vllm_dcp_mla.backends.{module}"), name)
    asked = []
    layer = SimpleNamespace(
        prefill_backend=None,
        dcp_manager=MLADCPManager.__new__(MLADCPManager),
        impl=SimpleNamespace(plan_gather=asked.append, widens_keys=False),
    )
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    groups = SimpleNamespace(world_size=2, rank_in_group=0)
    place = "vllm.model_executor.layers.attention.sparse_mla_attention.get_dcp_group"
    with (
        engine(dcp=2, pcp=pcp, settings={"kernel": kernel}) as config,
        mock.patch(place, lambda: groups),
    ):
        config.parallel_config.cp_kv_cache_interleave_size = 64
        config.compilation_config.static_forward_context |= {"a": layer, "b": layer, "c": layer}
        backend.get_builder_cls()(spec, ["a", "b"], config, torch.device("cpu"))
    assert asked == ([] if pcp == 1 else [64, 64])


def test_without_pcp_there_is_none(kind):
    from importlib import import_module

    module, name, kernel = CLASSES[kind]
    backend = getattr(import_module(f"vllm_dcp_mla.backends.{module}"), name)
    with engine(settings={"kernel": kernel}) as config:
        impl = make_impl(backend, config)
    assert impl.gather_plan is None
    assert device_buffer._GATHERED == {}


def test_a_limit_that_holds_nothing_names_the_bytes(kind):
    with pytest.raises(ValueError, match=r"gather_limit_bytes is 1000, but .* bytes; raise"):
        Rank(kind, limit=1000)
