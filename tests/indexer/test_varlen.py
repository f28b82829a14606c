"""vLLM's decode branch for SM100, where each request has a query length of its own.

On capability 10 with DeepGEMM, stock's ``build()`` expands decodes with a Triton kernel that reads
the requests' boundaries on the device, and hands DeepGEMM the request of each row. Here that branch
runs on the CPU: the capability is patched in the indexer's module, the kernel is interpreted, and
DeepGEMM's schedule is a stand-in. Our bounds, localised per rank, are compared with plain Python.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from backend_engine import MEMBERS, backends  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from indexer_batches import WIDTH, builder, common_metadata, pad, sm100  # noqa: E402

from release_marks import ANY_BATCH_GRAPHS, since  # noqa: E402
from vllm_dcp_mla.topology import local_seq_len  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("cpu_vllm"),
    since(30, "no kernel of its own expands SM100's decode rows"),
]

GARBAGE = 77_777


def poison(made):
    """Whatever an earlier step may have left in the buffers that CUDA graphs read."""
    for name, value in vars(made).items():
        if name.endswith("_buffer") and name not in ("offsets_buffer", "arange_buffer"):
            if value is None:  # some series make one when it is first needed
                continue
            value.fill_(GARBAGE)


def rows_of(lengths, queries):
    """Request and global bound of each decode row, in order."""
    return [
        (request, length - count + row + 1)
        for request, (length, count) in enumerate(zip(lengths, queries, strict=True))
        for row in range(count)
    ]


def check(made, decode, lengths, queries, rank, dcp, interleave, padding=0):
    rows = rows_of(lengths, queries)
    local = [local_seq_len(bound, rank, dcp, interleave) for _, bound in rows]
    assert decode.seq_lens.shape == (len(rows) + padding, 1)
    assert decode.seq_lens[:, 0].tolist() == local + [0] * padding
    # A graph of more rows reads on: nothing of an earlier step may be there.
    assert not made.decode_seq_lens_buffer[len(rows) + padding :].any()
    assert decode.block_table.shape == (len(rows) + padding, WIDTH)
    first = decode.block_table[: len(rows)]
    wanted = [[request * WIDTH + column for column in range(WIDTH)] for request, _ in rows]
    assert first.tolist() == wanted
    assert not decode.block_table[len(rows) :].any()
    assert decode.indices[: len(rows)].tolist() == [request for request, _ in rows]
    # Rows of nobody are of requests of their own, so that DeepGEMM pairs them with none.
    assert len(set(decode.indices[len(rows) :].tolist()) - set(range(len(queries)))) == padding
    assert decode.decode_lens.tolist() == [1] * (len(rows) + padding)
    assert decode.per_req_decode_lens[: len(queries)].tolist() == list(queries)
    assert not decode.requires_padding
    if max(queries) > 1:
        bounds = [bound for _, bound in rows] + [0] * padding
        assert decode.global_seq_lens.tolist() == bounds
    else:
        assert decode.global_seq_lens[: len(lengths)].tolist() == list(lengths)


@settings(max_examples=12)
@given(
    requests=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 4)), min_size=1, max_size=5),
    dcp=st.sampled_from([2, 4, 8]),
    interleave=st.sampled_from([1, 64]),
    padding=st.sampled_from([0, 0, 3]),
    prefill=st.booleans(),
    data=st.data(),
)
def test_decode_rows(requests, dcp, interleave, padding, prefill, data):
    rank = data.draw(st.integers(0, dcp - 1))
    queries = [count for _, count in requests]
    lengths = [context + count for context, count in requests]
    behind = [(70, 60)] if prefill and not padding else []
    common = common_metadata(
        lengths + [length for length, _ in behind],
        queries + [count for _, count in behind],
        len(queries), rank, dcp, interleave,
    )  # fmt: skip
    if padding:
        common = pad(common, requests=2, tokens=padding)
    with (
        sm100() as asked,
        builder(rank=rank, dcp=dcp, interleave=interleave, mtp=3) as made,
    ):
        assert made.supports_varlen
        poison(made)
        metadata = made.build(0, common)
    assert metadata.num_decode_tokens == sum(queries) + padding
    assert (metadata.prefill is not None) is bool(behind)
    check(made, metadata.decode, lengths, queries, rank, dcp, interleave, padding)
    stored = any(local_seq_len(length, rank, dcp, interleave) for length in lengths)
    assert bool(asked) is stored
    assert bool(metadata.decode.schedule_metadata.any()) is stored
    for context, indices in asked:
        assert torch.equal(context, metadata.decode.seq_lens)
        assert torch.equal(indices, metadata.decode.indices)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    ("lengths", "stored"), [((448, 60), False), ((449, 60), True), ((60, 449), True)]
)
def test_a_rank_without_keys_asks_deepgemm_for_nothing(lengths, stored, padding):
    """Rank 7 stores what lies behind 448 tokens; more rows than requests."""
    common = common_metadata(list(lengths), [3, 2], 2, 7, 8, 64)
    if padding:
        common = pad(common, requests=2, tokens=padding)
    with sm100() as asked, builder(rank=7, dcp=8, interleave=64, mtp=3) as made:
        poison(made)
        decode = made.build(0, common).decode
    check(made, decode, lengths, [3, 2], 7, 8, 64, padding)
    assert len(asked) == stored
    # DeepGEMM's stand-in schedules something wherever it is asked.
    assert bool(decode.schedule_metadata.any()) is stored


@pytest.mark.parametrize("rank", range(4))
def test_rows_follow_the_boundaries_on_the_device(rank):
    """With adaptive verification the host knows the sum, and at most how long each query is."""
    lengths, queries, host = [50, 9, 300], [2, 4, 1], [4, 4, 4]
    common = common_metadata(lengths, queries, 3, rank, 4)
    host_starts = torch.tensor([0, *host]).cumsum(0).int()
    common = common.replace(
        query_start_loc_cpu=host_starts, num_actual_tokens=sum(host), max_query_len=4
    )
    with sm100() as asked, builder(rank=rank, dcp=4, mtp=3, adaptive=True) as made:
        poison(made)
        decode = made.build(0, common).decode
    check(made, decode, lengths, queries, rank, 4, 1, padding=sum(host) - sum(queries))
    # The host does not know which rows are empty here: DeepGEMM is always asked.
    assert len(asked) == 1


def test_metadata_is_stocks_in_this_branch():
    made = {}
    common = common_metadata([70, 5, 500], [4, 2, 3], 3, 1, 4)
    for ours in (True, False):
        with sm100(), builder(ours=ours, rank=1, dcp=4, mtp=3) as one:
            made[ours] = one.build(0, common).decode
    for field in made[True].__dataclass_fields__:
        a, b = (getattr(made[ours], field) for ours in (True, False))
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b, field


@since(31, "no graphs of decodes of different lengths")
@pytest.mark.parametrize("mtp", [0, 1, 3])
@pytest.mark.parametrize("member", MEMBERS)
def test_full_graphs_of_such_batches_are_captured(mtp, member):
    """What vLLM asks before it captures decodes of 1 to 1 + mtp tokens a request."""
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

    from vllm_dcp_mla.indexer.builder import DcpIndexerBackend, DcpIndexerBuilder

    attention = backends()[member]
    with sm100(), builder(dcp=4, mtp=mtp) as made:
        config = made.vllm_config
        if mtp:
            config.speculative_config.parallel_drafting = False
        groups = [
            SimpleNamespace(
                backend=backend,
                layer_names=[backend.__name__],
                kv_cache_spec=made.kv_cache_spec,
                get_metadata_builder=lambda index, backend=backend: backend.get_builder_cls(),
            )
            for backend in (attention, DcpIndexerBackend)
        ]
        support = DcpIndexerBuilder.get_cudagraph_support(config, made.kv_cache_spec)
        assert support is AttentionCGSupport.ALWAYS
        asked = (
            get_varlen_cudagraph_unsupported_backend([groups], config, most)
            for most in (1 + mtp, 2 + mtp)
        )
        longer = None if ANY_BATCH_GRAPHS else (attention.__name__, 1 + mtp)
        assert list(asked) == [None, longer]


def sm100_steps(rank, num_ranks, folder, shapes, seed):
    """The self-test's steps on one rank, with the branch above; also how often it ran."""
    from vllm_dcp_mla.indexer.builder import DcpIndexerBuilder
    from vllm_dcp_mla.models import load_config
    from vllm_dcp_mla.selftest import attention
    from vllm_dcp_mla.selftest.subjects import subject_of
    from vllm_dcp_mla.selftest.world import Sizes

    config = load_config("glm-5.2") | {"index_topk": shapes[0].topk}
    built = DcpIndexerBuilder.build
    varlen = []

    def build(self, *args, **kwargs):
        metadata = built(self, *args, **kwargs)
        varlen.append(metadata.decode is not None and metadata.decode.indices is not None)
        return metadata

    DcpIndexerBuilder.build = build
    with sm100():
        steps = attention.run_steps(
            *(rank, num_ranks, folder, shapes, config, "ag_rs", Sizes(num_ranks, 1, num_ranks)),
            *(seed, "cpu", subject_of("b200")),
        )
    return [step.error for step in steps], varlen


@pytest.mark.parametrize("interleave", [1, 64])
def test_attention_over_its_keys_is_dense_attention(interleave):
    """Indexer, attention and merge of two ranks, against float64 over the unsharded cache."""
    from vllm_dcp_mla.selftest import world
    from vllm_dcp_mla.selftest.batch import Shape
    from vllm_dcp_mla.selftest.run import ERROR_LIMIT

    shapes = (
        Shape("decode", (5, 1, 700, 65), (1, 1, 1, 1), 4, 64, interleave),
        Shape("every length", (4, 129, 600, 2), (4, 2, 3, 1), 4, 64, interleave),
        Shape("mixed", (300, 1, 3, 90), (2, 1, 3, 9), 3, 64, interleave),
    )
    for errors, varlen in world.run_ranks(2, sm100_steps, shapes, 20_261_129):
        assert varlen == [True] * len(shapes)
        assert max(errors) < ERROR_LIMIT
