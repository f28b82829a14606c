"""What a step gathers, from the rows that vLLM's own PCP manager gives each rank."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from release_marks import gathers_here  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm"), gathers_here]

CPU = torch.device("cpu")


def rows_of_ranks(shape, pcp, dcp):
    """What each PCP rank's builder gets of a batch: metadata in vLLM's terms, and its decodes."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.pcp_manager import PCPManager

    from vllm_dcp_mla.selftest import partition

    for rank in range(pcp):
        manager = PCPManager(
            pcp, rank, CPU, shard_decode_requests=False, max_num_reqs=64, max_num_tokens=4096,
            dcp_world_size=dcp, dcp_rank=rank, cp_interleave=shape.interleave,
        )  # fmt: skip
        local = manager.partition_batch(
            partition._input_batch(shape, CPU), SimpleNamespace(cg_mode=CUDAGraphMode.NONE)
        )
        num_rows = local.num_reqs
        yield (
            SimpleNamespace(
                num_reqs=num_rows,
                req_idx=local.idx_mapping_np,
                query_start_loc_cpu=torch.from_numpy(local.query_start_loc_np[: num_rows + 1]),
                seq_lens_cpu_upper_bound=local.seq_lens_cpu_upper_bound[:num_rows],
                dcp_local_seq_lens_cpu_upper_bound=(
                    local.pcp.dcp_local_seq_lens_cpu_upper_bound[:num_rows]
                ),
            ),
            int((~local.is_prefilling_np[:num_rows]).sum()),
        )


def step(common, num_decodes, rows_per_rank, dcp, interleave):
    from vllm_dcp_mla.backends.gather_metadata import plan_step
    from vllm_dcp_mla.gather_plan import GatherPlan

    plan = GatherPlan(rows_per_rank, 0, 1, 0)
    return plan_step(common, num_decodes, plan, dcp=dcp, interleave=interleave, device=CPU)


@st.composite
def batches(draw):
    from vllm_dcp_mla.selftest.batch import Shape

    interleave = draw(st.sampled_from([1, 4, 64]))
    decodes = draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4)), max_size=3))
    prefills = draw(
        st.lists(st.tuples(st.integers(0, 600), st.integers(1, 200)), min_size=1, max_size=4)
    )
    requests = [*decodes, *prefills]
    return Shape(
        "drawn",
        tuple(before + queries for before, queries in requests),
        tuple(queries for _, queries in requests),
        len(decodes),
        8,
        interleave,
    )


@pytest.mark.parametrize(("pcp", "dcp"), [(2, 2), (4, 4), (2, 4), (4, 8)])
@settings(max_examples=40)
@given(shape=batches(), turns=st.integers(1, 300))
def test_every_rank_gathers_the_same_chunks_and_attends_its_own_rows(pcp, dcp, shape, turns):
    capacity = turns * shape.interleave
    plans, attended = set(), []
    for common, num_decodes in rows_of_ranks(shape, pcp, dcp):
        assert num_decodes == shape.num_decodes
        made = step(common, num_decodes, capacity, dcp, shape.interleave)
        plans.add(tuple(chunk.plan for chunk in made.chunks))
        covered = set()
        for chunk in made.chunks:
            first, last = chunk.plan.requests
            tokens = range(chunk.tokens.start, chunk.tokens.stop)
            assert len(chunk.request_of_token) == len(tokens)
            assert set(chunk.request_of_token.tolist()) == set(range(last - first))
            assert len(chunk.row_starts) == last - first
            covered |= set(tokens)
        decode_tokens = int(common.query_start_loc_cpu[num_decodes])
        assert covered == set(range(decode_tokens, int(common.query_start_loc_cpu[-1])))
        attended.append(len(covered))
    assert len(plans) == 1
    short = sum(q for q in shape.query_lens[shape.num_decodes :] if q < 2 * pcp)
    assert sum(attended) >= sum(shape.query_lens[shape.num_decodes :]) + (pcp - 1) * short


def test_unequal_rows_are_what_was_reported_to_hang():
    from vllm_dcp_mla.selftest.batch import Shape

    shape = Shape("s", (313 + 300,), (313,), 0, 8)
    tokens = [
        [c.tokens for c in step(common, n, 100, 2, 1).chunks]
        for common, n in rows_of_ranks(shape, 2, 2)
    ]
    assert tokens == [[slice(0, 155)] * 4, [slice(0, 158)] * 4]


@pytest.mark.parametrize("interleave", [1, 16])
def test_rows_sent_are_the_requests_in_order_and_each_layers_strides(interleave):
    from vllm_dcp_mla.selftest.batch import Shape

    shape = Shape("s", (9, 700, 40, 130), (1, 50, 40, 20), 1, 8, interleave)
    common, decodes = next(iter(rows_of_ranks(shape, 2, 2)))
    table = torch.arange(len(common.req_idx) * 8, dtype=torch.int32).view(-1, 8).flip(1) * 3 + 5
    made = step(common, decodes, 64, 2, interleave)
    shares = common.dcp_local_seq_lens_cpu_upper_bound.tolist()
    row_of = {request: common.req_idx.tolist().index(request) for request in (1, 2, 3)}
    wanted = []
    for chunk in made.chunks:
        for request, count in zip(range(*chunk.plan.requests), chunk.plan.rows, strict=True):
            row = row_of[request + 1]
            for local in range(chunk.plan.start, chunk.plan.start + count):
                wanted.append((int(table[row, local // 64]), local % 64))
    assert len(wanted) == made.num_rows == sum(shares[row] for row in row_of.values())
    assert any(not chunk.plan.whole for chunk in made.chunks)
    for stride in (64, 192):
        rows = made.cache_rows(table, 64, stride)
        assert rows.dtype == torch.int32
        assert rows.tolist() == [block * stride + offset for block, offset in wanted]
        assert made.cache_rows(table, 64, stride) is rows
    assert made.chunks[0].rows.start == 0
    ends = [chunk.rows.stop for chunk in made.chunks]
    assert ends == np.cumsum([chunk.plan.rows_per_rank for chunk in made.chunks]).tolist()


def test_tensors_that_kernels_get_begin_aligned():
    from vllm_dcp_mla.selftest.batch import Shape

    shape = Shape("s", (33, 41, 29, 77), (33, 41, 29, 77), 0, 8)
    common, decodes = next(iter(rows_of_ranks(shape, 2, 2)))
    made = step(common, decodes, 40, 2, 1)
    assert len(made.chunks) > 2
    for chunk in made.chunks:
        for tensor in (chunk.request_of_token, chunk.row_starts):
            assert tensor.storage_offset() % 4 == 0


def test_a_dummy_batch_has_a_request_a_row():
    common = SimpleNamespace(
        num_reqs=3,
        req_idx=None,
        query_start_loc_cpu=torch.tensor([0, 1, 401, 801], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor([5, 400, 401], dtype=torch.int32),
        dcp_local_seq_lens_cpu_upper_bound=None,
    )
    made = step(common, 1, 128, 4, 1)
    assert [(c.plan.requests, c.plan.rows, c.tokens) for c in made.chunks] == [
        ((0, 1), (100,), slice(1, 401)),
        ((1, 2), (101,), slice(401, 801)),
    ]
