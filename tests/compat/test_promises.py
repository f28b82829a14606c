"""The fixes of vLLM 0.30, made true by the package on every series; bare 0.29 fails each.

Each test asks stock first: what it says must be what the table of releases has for the series.
"""

import contextlib
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
from backend_engine import engine, make_impl  # noqa: E402
from indexer_batches import HostReads, builder, common_metadata, on_device  # noqa: E402

from release_marks import KEEPS_RANK_ON_DEVICE, RELEASE, SIZES_WORKSPACE  # noqa: E402
from vllm_dcp_mla import softmax_stats_bytes  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm", "no_buffers")]

HEADS, TOKENS, STEP = 64, 12_288, 16_384


def stock_workspace_bytes(config):
    """The workspace that stock's builder leaves behind at TP8 DCP8, its memory not touched."""
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse as stock

    class Builder(stock.FlashInferMLASparseTRTLLMMetadataBuilder):
        dcp_world_size = 8

    sizes = []

    def zeros(size, **kwargs):
        sizes.append(size)
        return torch.empty(size, dtype=torch.int8, device="meta")

    with (
        mock.patch.object(stock, "_fi_sparse_workspace", None),
        mock.patch.object(stock.torch, "zeros", zeros),
        mock.patch.object(stock.FlashInferMLASparseMetadataBuilder, "__init__", lambda *a: None),
    ):
        Builder(None, [], config, torch.device("cpu"))
        stock._get_workspace_buffer(torch.device("cpu"))
    return sizes[-1]


def test_softmax_statistics_of_a_long_prompt_fit_the_workspace():
    """The report: 1,611,661,312 bytes asked for, of 413,138,944."""
    from vllm_dcp_mla.backends.trtllm import DcpFlashInferMLASparseBackend

    needed = softmax_stats_bytes(HEADS, TOKENS)
    assert needed == 1_611_661_312
    with engine(max_tokens=STEP) as config:
        assert (stock_workspace_bytes(config) >= needed) is SIZES_WORKSPACE
        impl = make_impl(DcpFlashInferMLASparseBackend, config)
    plan = impl._plans[HEADS]
    for launch in plan.launches(TOKENS):
        assert softmax_stats_bytes(HEADS, launch.stop - launch.start) <= plan.slab_bytes
    assert plan.total_bytes == impl._buffers.workspace.numel() == 951_058_432


def no_sequences():
    lse = torch.randn(3, 4)
    return lse, torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)


def test_a_rank_without_sequences_is_masked():
    from vllm.v1.attention.ops import dcp

    from vllm_dcp_mla.compat import empty_mask

    stock = getattr(dcp.mask_dcp_empty_shards_, "__wrapped__", dcp.mask_dcp_empty_shards_)
    raises = contextlib.nullcontext() if RELEASE.masks_no_sequences else pytest.raises(IndexError)
    with raises:
        stock(*no_sequences())
    empty_mask.install()
    before = dcp.mask_dcp_empty_shards_
    empty_mask.install()
    assert dcp.mask_dcp_empty_shards_ is before
    assert hasattr(before, "__wrapped__") is not RELEASE.masks_no_sequences
    lse, *lengths = no_sequences()
    dcp.mask_dcp_empty_shards_(lse, *lengths)
    assert torch.isinf(lse).all()
    # The untouched branches.
    lse = torch.zeros(2, 4)
    dcp.mask_dcp_empty_shards_(lse, torch.tensor([5, 0]), torch.tensor([0, 1, 2]))
    assert torch.equal(torch.isinf(lse).all(-1), torch.tensor([False, True]))
    dcp.mask_dcp_empty_shards_(lse, None, None)
    with pytest.raises(ValueError, match="query_start_loc"):
        dcp.mask_dcp_empty_shards_(
            torch.zeros(2, 4), torch.zeros(0, dtype=torch.int32), torch.tensor([0, 1])
        )


@contextlib.contextmanager
def no_new_tensors():
    """Host values become no device tensors: on a GPU, each waits for the copy."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"torch.tensor{args} in a metadata build")

    with mock.patch.object(torch, "tensor", refuse):
        yield


@pytest.mark.parametrize("mtp", [0, 3])
@pytest.mark.parametrize("ours", [True, False])
def test_a_decode_build_makes_no_tensor_of_the_rank(ours, mtp):
    lengths = [70 + mtp, 5 + mtp, 300 + mtp]
    with builder(ours=ours, rank=2, dcp=8, mtp=mtp) as made:
        common = common_metadata(lengths, [1 + mtp] * 3, 3, 2, 8)
        wanted = made.build(0, common).decode.seq_lens.clone()
        good = ours or KEEPS_RANK_ON_DEVICE
        with no_new_tensors(), contextlib.nullcontext() if good else pytest.raises(AssertionError):
            for _ in range(2):
                decode = made.build(0, common).decode
    if good:
        assert torch.equal(decode.seq_lens, wanted)


def test_a_decode_build_waits_for_nothing():
    from vllm.v1.attention.backends.mla import indexer

    prepare = next(n for n in vars(indexer) if n.lower() == "_prepare_uniform_decode_kernel")
    with (
        mock.patch.object(indexer, prepare),
        mock.patch("vllm_dcp_mla.indexer.builder.write_local_lengths") as write,
        builder(rank=2, dcp=8, device="meta") as made,
        HostReads() as reads,
    ):
        common = common_metadata([70, 5, 300], [1, 1, 1], 3, 2, 8, wrap=on_device)
        with no_new_tensors():
            made.build(0, common)
    assert reads.count == 0
    assert write.call_count == 1


def reasons(config, name, cache, **parallel):
    """What (stock's class, ours) answer selection with on a B200."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
        FlashInferMLASparseTRTLLMBackend,
    )
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend

    from vllm_dcp_mla.backends.flashmla import DcpFlashMLASparseBackend
    from vllm_dcp_mla.backends.trtllm import DcpFlashInferMLASparseBackend

    pair = {
        "FLASHINFER": (FlashInferMLASparseTRTLLMBackend, DcpFlashInferMLASparseBackend),
        "FLASHMLA": (FlashMLASparseBackend, DcpFlashMLASparseBackend),
    }[name]
    config.additional_config = {}
    for field, value in parallel.items():
        setattr(config.parallel_config, field, value)
    asked = (576, torch.bfloat16, cache, None, True, False, True, False, DeviceCapability(10, 0))
    return [cls.supports_combination(*asked) for cls in pair]


PCP = {
    "tensor_parallel_size": 1,
    "prefill_context_parallel_size": 4,
    "decode_context_parallel_size": 4,
    "dcp_comm_backend": "ag_rs",
}


def test_pcp_with_dcp_is_refused_where_nothing_gathers():
    with engine() as config:
        stock, ours = reasons(config, "FLASHMLA", "fp8_ds_mla", **PCP)
    assert stock is None  # 0.29 says nothing, and merges what does not belong together
    if RELEASE.gathers_pcp_with_dcp:
        assert ours is None
    else:
        assert "PCP with DCP needs 0.30 or newer" in ours
        assert "works here: --tensor-parallel-size 4" in ours


def test_pcp_with_dcp_on_flashinfer_is_served_or_refused():
    with engine() as config:
        stock, ours = reasons(config, "FLASHINFER", "fp8_e4m3", **PCP)
    assert (stock is not None) is RELEASE.gathers_pcp_with_dcp
    if RELEASE.gathers_here:
        assert ours is None
    else:
        assert "works here" in ours


@pytest.mark.parametrize("name", ["FLASHINFER", "FLASHMLA"])
def test_an_interleave_that_the_indexer_refuses_is_a_reason(name):
    cache = {"FLASHINFER": "fp8_e4m3", "FLASHMLA": "fp8_ds_mla"}[name]
    with engine() as config:
        stock, ours = reasons(config, name, cache, cp_kv_cache_interleave_size=64)
    assert stock is None
    if RELEASE.interleaves:
        assert ours is None
        raises = contextlib.nullcontext()
    else:
        assert "got 64" in ours
        assert "works here: --cp-kv-cache-interleave-size 1" in ours
        raises = pytest.raises(NotImplementedError, match="interleave")
    with raises, builder(ours=False, interleave=64):
        pass


def test_an_exchange_that_flashmla_refuses_is_a_reason():
    with engine() as config:
        stock, ours = reasons(config, "FLASHMLA", "fp8_ds_mla", dcp_comm_backend="a2a")
    assert stock is None  # and its builder raises, before 0.33
    if RELEASE.flashmla_takes_a2a:
        assert ours is None
    else:
        assert "takes --dcp-comm-backend ag_rs only" in ours


def test_glm_has_the_cache_that_the_table_says():
    """``--kv-cache-dtype auto`` of GLM-5.x on a B200."""
    import inspect

    from vllm.model_executor.models.config import GlmMoeDsaForCausalLM

    source = inspect.getsource(GlmMoeDsaForCausalLM)
    assert ("fp8_e4m3" in source) is RELEASE.defaults_to_fp8
