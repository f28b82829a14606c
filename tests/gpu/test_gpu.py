"""What needs a GPU (any of SM90 or newer) and stock vLLM; run with ``pytest tests/gpu -m gpu``."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
for folder in ("indexer", "kernels"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

BATCHES = {
    "decode": ([70, 5, 300], [1, 1, 1], 3, 0),
    "mtp": ([70, 5, 300], [3, 3, 3], 3, 2),
    "empty rank": ([1, 2], [1, 1], 2, 0),
    "prefill": ([70, 500], [60, 100], 0, 0),
    "mixed": ([70, 5, 2000], [1, 1, 900], 2, 0),
}


def wanted_rows(seq_lens, query_lens, rank, dcp):
    from vllm_dcp_mla.topology import local_seq_len

    return [
        local_seq_len(length - queries + i + 1, rank, dcp)
        for length, queries in zip(seq_lens, query_lens, strict=True)
        for i in range(queries)
    ]


def rows_of(metadata):
    rows = []
    if metadata.decode is not None:
        rows += metadata.decode.seq_lens.reshape(-1).tolist()
    if metadata.prefill is not None:
        for chunk in metadata.prefill.chunks:
            rows += (chunk.cu_seqlen_ke - chunk.cu_seqlen_ks).tolist()
    return rows


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("rank", [0, 7])
def test_build_never_waits_for_the_gpu(batch, rank):
    """With vLLM's own check, which also sees copies from pageable memory."""
    from indexer_batches import builder, common_metadata
    from vllm.utils import gpu_sync_debug

    seq_lens, query_lens, decodes, mtp = BATCHES[batch]
    device = torch.device("cuda:0")
    gpu_sync_debug._install_copy_checkers()
    limit = {"merge_limit_bytes": 40 * 2048 * 8 * 9}
    with builder(rank=rank, dcp=8, mtp=mtp, settings=limit, device=device) as made:
        common = common_metadata(
            seq_lens, query_lens, decodes, rank, 8, wrap=lambda t: t.to(device)
        )
        made.build(0, common)  # compiles what this machine has not compiled yet
        torch.cuda.synchronize()
        with gpu_sync_debug._checked_region("error"):
            metadata = made.build(0, common)
    assert rows_of(metadata) == wanted_rows(seq_lens, query_lens, rank, 8)


def test_stocks_prefill_build_waits():
    from indexer_batches import builder, common_metadata
    from vllm.utils import gpu_sync_debug

    seq_lens, query_lens, decodes, _ = BATCHES["prefill"]
    device = torch.device("cuda:0")
    with builder(ours=False, dcp=8, device=device) as made:
        common = common_metadata(seq_lens, query_lens, decodes, 0, 8, wrap=lambda t: t.to(device))
        with (
            gpu_sync_debug._checked_region("error"),
            pytest.raises(RuntimeError, match="GPU<->CPU sync"),
        ):
            made.build(0, common)


def test_local_lengths_of_any_view_in_one_compilation():
    import triton

    from vllm_dcp_mla.indexer.length_kernel import LOCAL_LENGTHS_KERNEL, write_local_lengths
    from vllm_dcp_mla.indexer.lengths import local_lengths

    LOCAL_LENGTHS_KERNEL.warmup()
    compiled = []
    hook = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs["repr"])
    try:
        for count, rank, dcp, interleave in ((1, 0, 1, 1), (16, 7, 8, 64), (3001, 1, 2, 1)):
            lengths = torch.randint(1 << 20, (count + 1,), dtype=torch.int32, device="cuda")[1:]
            local = torch.full((count + 3,), -7, dtype=torch.int32, device="cuda")[2:-1]
            write_local_lengths(lengths, local, rank=rank, dcp=dcp, interleave=interleave)
            assert torch.equal(local, local_lengths(lengths, rank, dcp, interleave))
            write_local_lengths(lengths, lengths, rank=rank, dcp=dcp, interleave=interleave)
            assert torch.equal(local, lengths)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook
    assert compiled == []


def test_one_compilation_serves_all_calls():
    import random

    import triton

    from vllm_dcp_mla.indexer import chunk_kernel

    compiled = []
    hook = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **kwargs: compiled.append(kwargs["repr"])
    try:
        chunk_kernel.CHUNK_BOUNDS_KERNEL.warmup(1)
        warmed = len(compiled)
        draw = random.Random(0)
        for _ in range(50):
            queries = [draw.randrange(1, 3000) for _ in range(draw.randrange(1, 4))]
            origin, dcp = draw.choice([0, 1, 16, 7]), draw.choice([1, 2, 8])
            starts = torch.tensor([0, *queries]).cumsum(0).int() + origin
            lengths = torch.tensor([q + draw.randrange(5000) for q in queries]).int()
            cumulative = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
            total = sum(queries)
            rank, interleave = draw.randrange(dcp), draw.choice([1, 64])
            offset = draw.randrange(4)  # views that are not aligned
            outputs = {}
            for device in ("cpu", "cuda"):

                def there(tensor, device=device, offset=offset):
                    memory = torch.zeros(len(tensor) + offset, dtype=torch.int32, device=device)
                    memory[offset:] = tensor
                    return memory[offset:]

                arguments = {
                    "query_start_loc": there(starts),
                    "seq_lens": there(lengths),
                    "cu_seq_lens": there(cumulative),
                    "row_start": there(cumulative * 2),
                    "token_to_seq": there(torch.full((int(cumulative[-1]),), -7)),
                    "key_start": there(torch.full((total,), -7)),
                    "key_end": there(torch.full((total,), -7)),
                    "token_origin": origin,
                    "dcp_rank": rank,
                    "dcp_world": dcp,
                    "interleave": interleave,
                    "num_requests": len(queries),
                    "compress_ratio": 1,
                }
                write = (
                    chunk_kernel.reference_chunk_bounds
                    if device == "cpu"
                    else chunk_kernel.write_chunk_bounds
                )
                write(**arguments)
                outputs[device] = [arguments[n] for n in ("key_start", "key_end", "token_to_seq")]
            for cpu, cuda in zip(*outputs.values(), strict=True):
                assert torch.equal(cpu, cuda.cpu())
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook
    assert warmed <= 1
    assert len(compiled) == warmed, "a call compiled after warm-up"


def test_deepgemm_does_nothing_with_an_empty_schedule():
    from vllm.utils.deep_gemm import _paged_mqa_logits_schedule_slots, fp8_fp4_paged_mqa_logits
    from vllm.utils.platform_utils import num_compute_units

    device = torch.device("cuda:0")
    rows, heads, dim, blocks = 5, 32, 128, 9
    query = torch.randn(rows, 1, heads, dim, device=device).to(torch.float8_e4m3fn)
    cache = torch.zeros(blocks, 64, 1, dim + 4, dtype=torch.uint8, device=device)
    slots = _paged_mqa_logits_schedule_slots(num_compute_units(0), 1)
    logits = fp8_fp4_paged_mqa_logits(
        (query, None),
        cache,
        torch.randn(rows, heads, device=device),
        torch.zeros(rows, 1, dtype=torch.int32, device=device),
        torch.zeros(rows, 4, dtype=torch.int32, device=device),
        torch.zeros(slots + 1, 2, dtype=torch.int32, device=device),
        max_model_len=256,
    )
    torch.cuda.synchronize()
    assert logits.shape[0] == rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_reference_kernel_runs_on_a_gpu(dtype):
    from dataclasses import replace

    import kernel_batches as common

    from vllm_dcp_mla.kernels import load_kernel
    from vllm_dcp_mla.kernels.base import LaunchBuffers
    from vllm_dcp_mla.kernels.split import launch_split
    from vllm_dcp_mla.workspace import WorkspacePlan

    batch = common.make_batch(9, 64, 128, dtype=dtype, seed=3)
    wanted, lse = common.expected(batch)
    moved = {name: getattr(batch, name) for name in batch.__slots__}
    moved = {n: v.cuda() for n, v in moved.items() if isinstance(v, torch.Tensor)}
    batch = replace(batch, **moved)
    cpu = common.make_buffers(64, 4)
    buffers = LaunchBuffers(cpu.workspace.cuda(), cpu.counters.cuda())
    launch_split(load_kernel("reference"), batch, buffers, WorkspacePlan(64, 4, 0, 0))
    torch.testing.assert_close(batch.out.cpu().double(), wanted, rtol=2**-7, atol=4e-3)
    torch.testing.assert_close(batch.lse.cpu().double(), lse, rtol=1e-4, atol=1e-4)
