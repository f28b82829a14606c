"""Buffers and estimates: values worked out by hand and figures of reports."""

import pytest

from vllm_dcp_mla.models import load_config
from vllm_dcp_mla.planner import buffers, estimates
from vllm_dcp_mla.planner.model_spec import read_model_spec
from vllm_dcp_mla.planner.workload import Workload

GIB = 1 << 30
GLM = read_model_spec(load_config("glm-5.2"), "")
DEEPSEEK = read_model_spec(load_config("deepseek-v3.2"), "")


def sizes(tokens=16384, length=1_048_576, seqs=1024, block=64, drafts=0):
    return Workload(tokens, length, seqs, block, drafts)


@pytest.mark.parametrize(
    ("tokens", "dcp", "gib"), [(32768, 4, 0.5), (4096, 4, 0.0625), (16384, 8, 0.125), (16384, 1, 1)]
)
def test_the_indexers_block_table(tokens, dcp, gib):
    assert buffers.expanded_block_table_bytes(sizes(tokens), dcp) == gib * GIB


@pytest.mark.parametrize(
    ("length", "block", "dcp", "width"),
    [
        (1_048_576, 64, 2, 8192),
        (1_048_576, 64, 1, 16384),
        (3895 * 64, 64, 1, 3896),  # aligned to 128 tokens
        (1_048_576, 128, 8, 1024),
        (1, 64, 8, 2),
    ],
)
def test_one_width_for_all_block_tables(length, block, dcp, width):
    assert buffers.block_table_width(sizes(length=length, block=block), dcp) == width


@pytest.mark.parametrize(
    ("length", "pcp", "dcp", "size"),
    [
        (1_000_000, 1, 8, 16 * 1_000_000 * 132 + (1 << 20)),
        (163_840, 1, 1, 40 * 163_840 * 132 + (1 << 20)),
        (1_048_576, 4, 4, 3 * 16 * 1_048_576 * 132 + (1 << 20)),
        (1_048_576, 4, 1, 16 * 1_048_576 * 132 + (1 << 20)),
    ],
)
def test_the_indexers_gathered_keys(length, pcp, dcp, size):
    assert buffers.indexer_gather_bytes(GLM, sizes(length=length), pcp, dcp) == size


@pytest.mark.parametrize(("tokens", "gib"), [(32768, 11.312), (4096, 3.875)])
def test_flashmlas_gathered_rows(tokens, gib):
    size = buffers.flashmla_gather_bytes(GLM, sizes(tokens), 64, 1, 4, 4)
    assert size / GIB == pytest.approx(gib, abs=0.001)


@pytest.mark.parametrize(("dcp", "gib"), [(4, 0.088), (8, 0.079), (1, 0.0703)])
def test_the_context_of_dense_prefills(dcp, gib):
    size = buffers.context_workspace_bytes(GLM, sizes(), dcp)
    assert size / GIB == pytest.approx(gib, abs=0.0005)


def test_few_requests_make_a_small_context():
    assert buffers.context_rows(GLM, sizes(seqs=3), 1) == 3 * 2048
    # DCP needs whole blocks of every rank.
    assert buffers.context_rows(GLM, sizes(seqs=3), 8, interleave=96) % (8 * 96) == 0


def test_masks_are_made_for_bf16_caches_of_sm100():
    assert buffers.mask_workspace_bytes(GLM, (10, 0), "bfloat16") == 128 << 20
    assert buffers.mask_workspace_bytes(DEEPSEEK, (10, 3), "bfloat16") == 128 << 20
    assert buffers.mask_workspace_bytes(GLM, (10, 0), "fp8_e4m3") == 0
    assert buffers.mask_workspace_bytes(GLM, (9, 0), "bfloat16") == 0


def test_rows_of_decodes_and_not_of_prefills():
    w = sizes(8192, seqs=64, drafts=3)
    assert w.decode_rows == 256
    assert buffers.index_group_bytes(GLM, w) == 22 * 257 * 2049 * 4
    assert sizes(100, seqs=100, drafts=3).decode_rows == 100


def test_direct_exchanges_at_tp8_dcp8():
    rows = buffers.symmetric_rows(sizes(), 1024)
    assert rows == 1024
    output = buffers.symmetric_output_bytes(rows, 8, 8, 512)
    query = buffers.symmetric_query_bytes(rows, 64, 576, 1)
    assert (round(output / GIB, 3), round(query / GIB, 3)) == (0.125, 0.035)


def test_one_layers_transients_at_tp8_dcp8():
    size = buffers.attention_transient_bytes(16384, 64, GLM, 1, a2a=True)
    assert size / GIB == pytest.approx(3.69, abs=0.02)


def test_the_moe_workspace_is_what_autotuning_asked_for():
    w = sizes(32768)
    e = estimates.autotune_bytes(GLM, w, (10, 0), 2, 2, fp4=True)
    assert e.low == e.bytes == e.high
    assert e.bytes / GIB == pytest.approx(12.22, abs=0.02)
    # Each rank has the tokens of all PCP ranks.
    alone = estimates.autotune_bytes(GLM, w, (10, 0), 4, 1, fp4=True)
    assert e.bytes == pytest.approx(2 * alone.bytes, rel=0.01)


def test_autotuning_is_an_estimate_for_other_checkpoints():
    e = estimates.autotune_bytes(GLM, sizes(), (10, 0), 8, 1, fp4=False)
    assert e.low == 0 < e.bytes < e.high
    assert estimates.autotune_bytes(GLM, sizes(), (9, 0), 8, 1, fp4=False).high == 0


def test_the_peak_is_the_largest_of_three():
    few = sizes(64, seqs=64)
    # No step is smaller than the indexer's logits.
    assert estimates.peak_bytes(GLM, few, 8, 1, fp4=True).bytes > 512 << 20
    many = sizes(1024, seqs=1024)
    sampled = 1024 * GLM.vocab_size * 14
    assert estimates.peak_bytes(GLM, many, 8, 1, fp4=True).bytes == sampled
    tokens = estimates.peak_bytes(GLM, sizes(65536), 8, 1, fp4=True)
    assert tokens.low < tokens.bytes < tokens.high
    assert tokens.bytes > estimates.fused_moe_bytes(GLM, 65536, 32)


def test_captured_tokens_follow_vllms_default():
    assert sizes(seqs=64, drafts=3).captured_tokens(1024) == 512
    assert sizes(seqs=1024).captured_tokens(512) == 512
    assert sizes(100, seqs=1024).captured_tokens(1024) == 100
