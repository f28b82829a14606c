"""The builder on the CPU: its bounds against brute force, its chunks, and what it never does."""

import gc
import itertools
import weakref
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from indexer_batches import (  # noqa: E402
    WIDTH,
    HostReads,
    builder,
    common_metadata,
    on_device,
    pad,
)

from release_marks import (  # noqa: E402
    INTERLEAVE_SIZES,
    INTERLEAVES,
    gathers_pcp_with_dcp,
)
from vllm_dcp_mla.topology import local_seq_len, local_seq_lens  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm")]


@pytest.fixture
def no_kernels():
    """No kernel is launched: their inputs may have no values."""
    from vllm.v1.attention.backends.mla import indexer

    prepare = next(n for n in vars(indexer) if n.lower() == "_prepare_uniform_decode_kernel")
    with (
        mock.patch("vllm_dcp_mla.indexer.chunks.write_chunk_bounds"),
        mock.patch("vllm_dcp_mla.indexer.builder.write_local_lengths"),
        mock.patch.object(indexer, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL"),
        mock.patch.object(indexer, prepare),
    ):
        yield


def check_prefill(metadata, seq_lens, query_lens, num_decodes, rank, dcp, interleave):
    """Every prefill row sees exactly the keys this rank stores of what the row may see."""
    rows = {}
    for chunk in metadata.prefill.chunks:
        cu_local = chunk.local_cu_seq_lens.tolist()
        requests = [int(r) // WIDTH for r in chunk.block_table[:, 0]]
        own = [local_seq_len(seq_lens[r], rank, dcp, interleave) for r in requests]
        assert [b - a for a, b in itertools.pairwise(cu_local)] == own
        assert chunk.local_total_seq_lens == sum(own)
        fullest = [local_seq_lens(seq_lens[r], dcp, interleave) for r in requests]
        assert chunk.max_local_total_seq_lens == max(map(sum, zip(*fullest, strict=True)))
        assert chunk.total_seq_lens == sum(seq_lens[r] for r in requests)
        assert chunk.token_to_seq.tolist() == [
            i for i, r in enumerate(requests) for _ in range(seq_lens[r])
        ]
        token = chunk.token_start
        bounds = zip(chunk.cu_seqlen_ks.tolist(), chunk.cu_seqlen_ke.tolist(), strict=True)
        for start, end in bounds:
            assert end - start <= getattr(chunk, "max_seqlen_k", end - start)  # from 0.33 on
            assert start in cu_local
            rows[token] = end - start
            token += 1
        assert token == chunk.token_end
    token = sum(query_lens[:num_decodes])
    assert sorted(rows) == list(range(token, sum(query_lens)))
    for length, queries in list(zip(seq_lens, query_lens, strict=True))[num_decodes:]:
        for position in range(length - queries, length):
            assert rows[token] == local_seq_len(position + 1, rank, dcp, interleave)
            token += 1


@settings(max_examples=15)
@given(
    requests=st.lists(st.tuples(st.integers(2, 60), st.integers(0, 900)), min_size=1, max_size=4),
    dcp=st.sampled_from([2, 4, 8]),
    interleave=st.sampled_from(INTERLEAVE_SIZES),
    limit=st.sampled_from([None, 3, 17]),
    data=st.data(),
)
def test_prefill_bounds(requests, dcp, interleave, limit, data):
    rank = data.draw(st.integers(0, dcp - 1))
    queries = [q for q, _ in requests]
    lengths = [q + context for q, context in requests]
    merge = {"merge_limit_bytes": limit * 2048 * 8 * (1 + dcp)} if limit else {}
    with builder(rank=rank, dcp=dcp, interleave=interleave, settings=merge) as made:
        metadata = made.build(0, common_metadata(lengths, queries, 0, rank, dcp, interleave))
    check_prefill(metadata, lengths, queries, 0, rank, dcp, interleave)
    if limit:
        assert all(c.token_end - c.token_start <= limit for c in metadata.prefill.chunks)


def test_chunks_are_the_same_on_every_rank():
    lengths, queries = [70, 5, 900], [60, 5, 100]
    spans = set()
    for rank in range(8):
        limit = {"merge_limit_bytes": 33 * 2048 * 8 * 9}
        with builder(rank=rank, dcp=8, settings=limit) as made:
            chunks = made.build(0, common_metadata(lengths, queries, 0, rank, 8)).prefill.chunks
        spans.add(tuple((c.token_start, c.token_end, c.max_local_total_seq_lens) for c in chunks))
    assert len(spans) == 1
    assert len(next(iter(spans))) == 5


def test_logits_are_budgeted_by_what_a_rank_stores(monkeypatch):
    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "1")
    counts = {}
    for ours in (True, False):
        with builder(ours=ours, dcp=8) as made:
            chunks = made.build(0, common_metadata([8192], [400], 0, 0, 8)).prefill.chunks
        counts[ours] = len(chunks)
        for chunk in chunks:
            rows = chunk.token_end - chunk.token_start
            assert rows * chunk.max_local_total_seq_lens * 4 <= 1 << 20
    assert counts == {True: 2, False: 13}


def test_gathered_keys_fit_the_workspace():
    with builder(dcp=8) as made:
        made.max_prefill_buffer_size = 250
        metadata = made.build(0, common_metadata([800, 800, 800], [9, 9, 9], 0, 0, 8))
    assert [c.max_local_total_seq_lens for c in metadata.prefill.chunks] == [200, 100]


def test_parts_of_one_prefill_share_what_only_depends_on_its_request():
    with builder(dcp=8, settings={"merge_limit_bytes": 10 * 2048 * 8 * 9}) as made:
        chunks = made.build(0, common_metadata([500], [35], 0, 0, 8)).prefill.chunks
    assert [c.skip_kv_gather for c in chunks] == [False, True, True, True]
    assert len({c.token_to_seq.data_ptr() for c in chunks}) == 1
    assert len({c.local_cu_seq_lens.data_ptr() for c in chunks}) == 1


# Eight tokens before the step, three query tokens, four ranks: the bounds of each row on each rank.
@pytest.mark.parametrize("flatten", [True, False])
def test_mtp_rows_are_localised_after_they_are_expanded(flatten):
    wanted = [[3, 2, 2, 2], [3, 3, 2, 2], [3, 3, 3, 2]]
    for rank in range(4):
        # The native path is vLLM's choice by GPU; both must give the same bounds.
        native = "vllm.v1.attention.backends.mla.indexer._supports_native_decode"
        with (
            builder(rank=rank, mtp=2, flatten=flatten) as made,
            mock.patch(native, lambda next_n: True),
        ):
            decode = made.build(0, common_metadata([11], [3], 1, rank, 4)).decode
        assert decode.seq_lens.reshape(-1).tolist() == [row[rank] for row in wanted]


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 4)), min_size=1, max_size=4),
    st.sampled_from([2, 8]),
    st.sampled_from(INTERLEAVE_SIZES),
    st.data(),
)
def test_decode_bounds(requests, dcp, interleave, data):
    rank = data.draw(st.integers(0, dcp - 1))
    queries = [q for _, q in requests]
    lengths = [context + q for context, q in requests]
    with builder(rank=rank, dcp=dcp, interleave=interleave, mtp=3, flatten=True) as made:
        decode = made.build(
            0, common_metadata(lengths, queries, len(queries), rank, dcp, interleave)
        ).decode
    wanted = [
        local_seq_len(length - queries_of + j + 1, rank, dcp, interleave)
        for length, queries_of in zip(lengths, queries, strict=True)
        for j in range(queries_of)
    ]
    assert decode.seq_lens.reshape(-1).tolist() == wanted
    assert decode.block_table.shape == (sum(queries), WIDTH)


@pytest.mark.parametrize(("mtp", "flatten"), [(0, False), (2, False), (2, True)])
def test_a_graph_finds_the_bounds_where_they_were_when_it_was_captured(mtp, flatten):
    native = "vllm.v1.attention.backends.mla.indexer._supports_native_decode"
    queries = [1 + mtp] * 2
    with (
        builder(dcp=2, mtp=mtp, flatten=flatten) as made,
        mock.patch(native, lambda next_n: True),
    ):
        places = set()
        for lengths in ([11, 40], [700, 90]):
            common = common_metadata(lengths, queries, 2, 0, 2)
            bounds = made.build(0, common).decode.seq_lens
            assert int(bounds.max()) <= max(lengths) // 2 + 1
            assert bounds.data_ptr() != common.seq_lens.data_ptr()
            places.add(bounds.data_ptr())
    assert len(places) == 1


BATCHES = {
    "decode": ([70, 5, 300], [1, 1, 1], 3),
    "prefill": ([70, 500], [60, 100], 0),
    "mixed": ([70, 5, 500], [1, 1, 90], 2),
    "nothing stored here": ([1, 1], [1, 1], 2),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.usefixtures("no_kernels")
def test_nothing_is_read_back_from_the_gpu(batch):
    limit = {"merge_limit_bytes": 40 * 2048 * 8 * 9}
    with builder(dcp=8, settings=limit, device="meta") as made, HostReads() as reads:
        metadata = made.build(0, common_metadata(*BATCHES[batch], 0, 8, wrap=on_device))
    assert reads.count == 0
    assert metadata.seq_lens.is_meta


@pytest.mark.usefixtures("no_kernels")
def test_stock_reads_back_twice_a_chunk():
    with builder(ours=False, dcp=8, device="meta") as made, HostReads() as reads:
        made.max_prefill_buffer_size = 100  # one chunk a request
        metadata = made.build(0, common_metadata([90, 90, 90], [9, 9, 9], 0, 0, 8, wrap=on_device))
    assert len(metadata.prefill.chunks) == 3
    assert reads.count == 6


def test_metadata_is_stocks_where_chunks_are():
    """One chunk, no limit in reach: every field that stock computes is the same."""
    made = {}
    for ours in (True, False):
        with builder(ours=ours, rank=1, dcp=4) as one:
            made[ours] = one.build(0, common_metadata([70, 5, 500], [1, 5, 90], 1, 1, 4))
    (ours,), (stock,) = made[True].prefill.chunks, made[False].prefill.chunks
    for field in stock.__dataclass_fields__:
        a, b = getattr(ours, field), getattr(stock, field)
        if field == "max_seqlen_k":
            assert (a, b) == (125, 500)  # the logits are as wide as a shard, not as the context
        elif isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), field
        else:
            assert a == b, field
    assert torch.equal(made[True].decode.seq_lens, made[False].decode.seq_lens)


@gathers_pcp_with_dcp
# The last: a rank with a short tail has no rows left for the plan's last part.
@pytest.mark.parametrize(
    "rows", [None, slice(0, 40), slice(10, 150), slice(150, 200), slice(170, 190)]
)
def test_pcp_rows_are_bounded_globally_with_the_same_kernel(rows):
    import numpy as np
    from vllm.v1.attention.backends.mla import indexer

    from vllm_dcp_mla.indexer.chunks import ChunkBuild

    lengths, queries = [70, 500], [60, 100]
    common = common_metadata(lengths, queries, 0, 0, 2)
    shards = np.array([local_seq_len(n, 0, 2) for n in lengths])
    plan = indexer.build_pcp_global_chunk_plan(np.arange(2), shards, 2, torch.device("cpu"))
    made = [
        function(
            0,
            2,
            common.query_start_loc,
            common.query_start_loc_cpu,
            common.seq_lens,
            common.seq_lens,
            common.seq_lens_cpu_upper_bound,
            common.block_table_tensor,
            1,
            query_slice=rows,
            dcp_rank=1,
            dcp_world_size=2,
            pcp_plan=plan,
        )
        for function in (ChunkBuild().chunk_metadata, indexer.build_prefill_chunk_metadata)
    ]
    for field in made[1].__dataclass_fields__:
        a, b = (getattr(m, field) for m in made)
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b, field


def test_chunks_of_the_same_requests_share_one_launch():
    """Bounding the exchange cuts a long prefill into many chunks; each launch costs the host."""
    from vllm_dcp_mla.indexer import chunks as module

    limit = {"merge_limit_bytes": 9 * 2048 * 8 * 3}
    lengths, queries = [500, 70], [100, 60]
    with (
        builder(dcp=2, settings=limit) as made,
        mock.patch.object(module, "write_chunk_bounds", wraps=module.write_chunk_bounds) as write,
    ):
        found = made.build(0, common_metadata(lengths, queries, 0, 0, 2))
    spans = {(chunk.block_table.data_ptr(), chunk.num_reqs) for chunk in found.prefill.chunks}
    assert len(found.prefill.chunks) >= 16
    assert write.call_count == len(spans) < 3
    # Stock's kernels up to 0.32 are compiled for this pointer's alignment.
    assert not any(chunk.cu_seqlen_ks.data_ptr() % 16 for chunk in found.prefill.chunks)
    check_prefill(found, lengths, queries, 0, 0, 2, 1)


@gathers_pcp_with_dcp
def test_with_a_pcp_plan_too_chunks_of_the_same_requests_share_one_launch(monkeypatch):
    """The budget of logits cuts there; a rank has two rows of a long request, with one context."""
    import numpy as np

    from vllm_dcp_mla.indexer import chunks as module

    monkeypatch.setenv("VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", "1")
    lengths, queries, requests = [300, 2100, 8192, 40], [250, 100, 90, 30], [0, 1, 1, 2]
    shards = [local_seq_len(n, 0, 2) for n in (300, 8192, 8192, 40)]
    common = common_metadata(lengths, queries, 0, 1, 2).replace(
        req_idx=np.array(requests),
        dcp_local_seq_lens_cpu_upper_bound=torch.tensor(shards, dtype=torch.int32),
    )
    made = {}
    with mock.patch.object(module, "write_chunk_bounds", wraps=module.write_chunk_bounds) as write:
        for ours in (True, False):
            with builder(ours=ours, rank=1, dcp=2, pcp=2) as one:
                made[ours] = one.build(0, common).prefill.chunks
    assert write.call_count == 3
    assert [chunk.num_reqs for chunk in made[True]] == [1, *[2] * 7, 1]
    for ours, stock in zip(made[True], made[False], strict=True):
        for field in stock.__dataclass_fields__:
            a, b = getattr(ours, field), getattr(stock, field)
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b, field


@gathers_pcp_with_dcp
def test_with_pcp_no_chunk_is_cut_for_an_exchange_that_does_not_happen():
    limit = {"merge_limit_bytes": 10 * 2048 * 8 * 3}
    spans = [(slice(0, 1), slice(0, 100))]
    for pcp, chunks in ((1, 10), (2, 1)):
        with builder(dcp=2, pcp=pcp, settings=limit) as made:
            lengths, queries = torch.tensor([500]), torch.tensor([100])
            split = made._split_indexer_prefill_chunks(lengths, queries, 10_000, 1 << 30)
        assert len(split) == chunks
    assert split == spans


@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("mtp", [0, 1, 3])
@pytest.mark.parametrize(
    ("longer", "prefill", "padding", "asked"),
    [
        ((0, 0), 0, 0, False),  # rank 7 stores nothing of requests of 7 turns
        ((0, 1), 0, 0, True),
        ((1, 0), 0, 0, True),
        ((0, 0), 30, 0, False),
        ((0, 0), 0, 2, False),
        ((0, 1), 0, 2, True),
    ],
)
def test_a_rank_without_keys_asks_deepgemm_for_nothing(
    longer, prefill, padding, asked, mtp, interleave
):
    """All-zero context lengths crashed older DeepGEMM; and there is nothing to schedule."""
    from vllm.v1.attention.backends.mla import indexer

    calls = []

    def deepgemm(context_lens, block_size, num_sms, **kwargs):
        calls.append(context_lens.clone())
        return torch.ones(num_sms + 1, 2, dtype=torch.int32)

    queries = [1 + mtp] * 2 + [prefill] * bool(prefill)
    lengths = [7 * interleave + more for more in longer] + [600] * bool(prefill)
    common = common_metadata(lengths, queries, 2, 7, 8, interleave)
    if padding:  # as a CUDA graph's: requests without length or query, tokens of nobody
        common = pad(common, requests=padding, tokens=padding * (1 + mtp))
    with (
        mock.patch.object(indexer.current_platform, "is_cuda", lambda: True, create=True),
        mock.patch.object(indexer, "has_deep_gemm", lambda: True),
        mock.patch("vllm.utils.deep_gemm._paged_mqa_logits_schedule_slots", lambda sms, n: sms),
        builder(rank=7, dcp=8, mtp=mtp, flatten=mtp > 1, interleave=interleave) as made,
        mock.patch.object(indexer, "_supports_native_decode", lambda next_n: True),
    ):
        dispatch = indexer.get_paged_mqa_logits_metadata
        closure = dict(zip(dispatch.__code__.co_freevars, dispatch.__closure__, strict=True))
        stock = closure["stock"].cell_contents
        closure["stock"].cell_contents = deepgemm
        try:
            decode = made.build(0, common).decode
        finally:
            closure["stock"].cell_contents = stock
    assert bool(calls) is asked
    assert all(call.any() for call in calls)
    assert bool(decode.schedule_metadata.any()) is asked


@pytest.mark.parametrize(
    ("enabled", "collecting", "registered", "compiled"),
    [(True, True, 2, 0), (True, False, 0, 2), (False, True, 0, 2), (False, False, 0, 2)],
)
def test_the_kernels_are_warmed_wherever_the_builder_is_made(
    enabled, collecting, registered, compiled
):
    """By vLLM where it collects warm-ups, else at once: no call is the first to compile."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

    from vllm_dcp_mla.indexer.builder import DcpIndexerBuilder
    from vllm_dcp_mla.indexer.chunk_kernel import CHUNK_BOUNDS_KERNEL
    from vllm_dcp_mla.indexer.length_kernel import LOCAL_LENGTHS_KERNEL

    warmup = mock.Mock()
    registry = JitWarmupRegistry(None)
    with builder(dcp=2) as made:
        made.vllm_config.kernel_config.enable_jit_warmup = enabled
        with (
            mock.patch.object(CHUNK_BOUNDS_KERNEL, "warmup", warmup),
            mock.patch.object(LOCAL_LENGTHS_KERNEL, "warmup", warmup),
            mock.patch(
                "vllm_dcp_mla.indexer.builder.DeepseekV32IndexerMetadataBuilder.__init__",
                lambda self, *args, **kwargs: self.__dict__.update(
                    made.__dict__, device=SimpleNamespace(type="cuda")
                ),
            ),
            registry.activate() if collecting else nullcontext(),
        ):
            DcpIndexerBuilder()
    assert (len(registry), warmup.call_count) == (registered, compiled)


def test_a_block_table_that_would_be_cut_off_is_refused():
    common = common_metadata([70], [1], 1, 0, 4)
    common.block_table_tensor = torch.zeros(1, WIDTH + 1, dtype=torch.int32)
    with builder() as made, pytest.raises(ValueError, match=f"{WIDTH + 1} blocks .* {WIDTH}"):
        made.build(0, common)


def test_a_builder_is_freed_without_the_garbage_collector():
    """It holds buffers on the GPU, and vLLM freezes the collector once an engine is up."""
    gc.disable()
    try:
        with builder() as made:
            made.build(0, common_metadata([70, 500], [1, 100], 1, 0, 4))
            freed = weakref.ref(made)
        del made
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", ["build_prefill_chunk_metadata", "split_decodes_and_prefills"])
def test_a_build_that_fails_leaves_nothing_behind(fails):
    from vllm.v1.attention.backends.mla import indexer

    from vllm_dcp_mla.indexer import scope

    common = common_metadata([70], [60], 0, 0, 4)
    with builder() as made:
        with (
            mock.patch.object(indexer, fails, side_effect=KeyError("planted")),
            pytest.raises(KeyError, match="planted"),
        ):
            made.build(0, common)
        assert scope.running() is None
        assert len(made.build(0, common).prefill.chunks) == 1


def test_a_limit_below_one_row_is_refused():
    with (
        pytest.raises(ValueError, match=r"merge_limit_bytes is 1000,.*needs 147456 bytes"),
        builder(dcp=8, settings={"merge_limit_bytes": 1000}),
    ):
        pass
