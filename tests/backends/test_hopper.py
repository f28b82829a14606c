"""The SM90 class, built as vLLM builds it, on the CPU with our Triton kernel interpreted."""

import logging
import math
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
from backend_engine import LAYER, engine, expected, make_impl, run  # noqa: E402

from release_marks import serves_hopper  # noqa: E402
from vllm_dcp_mla import device_buffer, kernel_choice  # noqa: E402
from vllm_dcp_mla.kernel_choice import Preference  # noqa: E402
from vllm_dcp_mla.key_splits import ANY, partial_bytes, tilings_of  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("cpu_vllm", "no_buffers"),
    serves_hopper,
]

TRITON = {"kernel": "triton_decode"}
FP8 = torch.float8_e4m3fn


def backend():
    from vllm_dcp_mla.backends.hopper import DcpFlashAttnMLASparseBackend

    return DcpFlashAttnMLASparseBackend


def made(cache_dtype="bfloat16", settings=TRITON, dims=(192, 64), **changes):
    with engine(settings=settings, **changes) as config:
        return make_impl(backend(), config, cache_dtype=cache_dtype, dims=dims)


@pytest.mark.parametrize(
    ("dtype", "name", "cache_scale"),
    [(torch.bfloat16, "bfloat16", 1.0), (FP8, "fp8_e4m3", 5.0), (FP8, "fp8", 5.0)],
)
@pytest.mark.parametrize("heads", [64, 13])
def test_attends_and_returns_a_natural_lse(dtype, name, cache_scale, heads):
    impl = made(name)
    assert impl.lse_base_on_e
    *inputs, out, lse = run(impl, dtype=dtype, query_dtype=torch.bfloat16, heads=heads)
    wanted, natural = expected(*inputs, 0.05 * cache_scale, cache_scale)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-6, atol=2e-2)
    torch.testing.assert_close(lse.double(), natural, rtol=1e-3, atol=1e-3)
    assert not out[0].any()
    assert torch.equal(lse[0], torch.full((heads,), -math.inf))


def test_a_model_without_a_rotary_part():
    impl = made(dims=(256, 0))
    *inputs, out, _ = run(impl, dim=512)
    torch.testing.assert_close(out.double(), expected(*inputs, 0.05, 1.0)[0], rtol=2**-6, atol=2e-2)


def test_a_query_in_two_parts_is_packed():
    impl = made()
    query, rows, topk, counts, whole, _ = run(impl)
    out, _ = impl._forward_mqa_kernel(
        (query[..., :512], query[..., 512:]),
        rows.view(-1, 64, 576),
        topk,
        counts,
        layer=LAYER,
        block_size=64,
        is_decode=True,
    )
    assert torch.equal(out, whole)


def test_a_cache_stored_as_bytes_whose_blocks_are_apart():
    impl = made("fp8_e4m3")
    query = torch.randn(2, 64, 576).bfloat16()
    wide = torch.full((3, 192, 576), float("nan")).to(FP8)
    wide[:, :64] = torch.randn(3, 64, 576).to(FP8)
    topk = torch.full((2, 128), -1, dtype=torch.int32)
    topk[0, :2] = torch.tensor([0, 2 * 192 + 5])  # block 2 starts two block strides on
    topk[1, :1] = 192 + 63
    counts = torch.tensor([2, 1], dtype=torch.int32)
    out, _ = impl._forward_mqa_kernel(
        query,
        wide.view(torch.uint8)[:, :64],
        topk,
        counts,
        layer=LAYER,
        block_size=64,
        is_decode=True,
    )
    wanted, _ = expected(query, wide.view(-1, 576), topk, counts, 0.05 * 5, 5.0)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-6, atol=3e-2)


def test_no_tokens():
    *_, out, lse = run(made(), tokens=0, counts=())
    assert out.shape == (0, 64, 512)
    assert lse.shape == (0, 64)


def test_all_layers_share_one_workspace_of_the_device():
    with engine(settings=TRITON) as config:
        impls = [make_impl(backend(), config) for _ in range(3)]
    assert len({impl._buffers.workspace.data_ptr() for impl in impls}) == 1
    (buffers,) = device_buffer._PARTIALS.values()
    assert buffers.workspace.numel() == partial_bytes(512, 4)
    assert device_buffer._BY_DEVICE == {}


class Leaves:
    """A kernel that leaves garbage in rows without tokens."""

    name, lse_base, clears_empty_rows = "leaves", "e", False

    def __init__(self, reason=None):
        self.reason, self.launched = reason, []

    def supports(self, shape):
        return self.reason

    def launch(self, batch, buffers):
        self.launched.append(len(batch.query))
        batch.out.fill_(math.nan)
        batch.lse.fill_(math.inf)


def with_kernels(**kernels):
    """``load_kernel`` with other kernels; those that are not given cannot be imported."""

    def load(name, **_):
        if name not in kernels:
            raise ImportError(f"{name} is not here")
        return kernels[name]

    return mock.patch("vllm_dcp_mla.backends.hopper_kernels.load_kernel", load)


def test_each_step_takes_the_kernel_of_the_table_that_takes_the_shape():
    ours, first, second = Leaves(), Leaves("not these heads"), Leaves()
    table = (
        Preference(ANY, ANY, 4, "triton_decode"),
        Preference(ANY, ANY, ANY, "flashmla"),
        Preference(ANY, ANY, ANY, "flash_attn3"),
    )
    with (
        mock.patch.object(kernel_choice, "PREFERENCES", table),
        with_kernels(triton_decode=ours, flashmla=first, flash_attn3=second),
    ):
        impl = made(settings={"kernel": "auto"})
    run(impl)
    run(impl, tokens=5, counts=(0, 1, 2, 3, 4))
    assert (ours.launched, first.launched, second.launched) == ([4], [], [5])


def test_without_libraries_ours_serves_all():
    ours = Leaves()
    with with_kernels(triton_decode=ours):
        impl = made(settings={"kernel": "auto"})
    *_, out, lse = run(impl, tokens=5, counts=(0, 1, 2, 3, 4))
    assert ours.launched == [5]
    assert not out[0].any(), "what a kernel leaves in an empty row must not get out"
    assert torch.equal(lse[0], torch.full((64,), -math.inf))


def test_a_forced_kernel_that_does_not_take_the_shape_is_named():
    with (
        with_kernels(flashmla=Leaves("it reads a bf16 cache, got torch.float8_e4m3fn")),
        pytest.raises(ValueError, match="kernel flashmla does not serve this model: it reads a"),
    ):
        made("fp8_e4m3", settings={"kernel": "flashmla"})


@pytest.mark.parametrize(("name", "lines"), [("fp8", 1), ("fp8_e4m3", 0), ("bfloat16", 0)])
def test_what_fp8_means_is_said_once(name, lines):
    from vllm import logger as vllm_logger

    vllm_logger._print_info_once.cache_clear()
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("vllm.dcp_mla.hopper")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        for _ in range(3):
            made(name)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert sum("fp8_e4m3 with one scale" in r.getMessage() for r in records) == lines


@pytest.mark.parametrize(("cache_dtype", "dtype"), [("fp8_e4m3", FP8), ("auto", torch.bfloat16)])
def test_every_kernel_of_a_layer_is_registered_for_warm_up(cache_dtype, dtype):
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    from vllm.v1.attention.backends.mla import compressor_utils, indexer

    from vllm_dcp_mla.kernels import merge_parts, triton_decode

    with engine(settings=TRITON) as config:
        config.kernel_config.enable_jit_warmup = True
        registry = JitWarmupRegistry(config)
        with registry.activate():
            for _ in range(2):
                make_impl(backend(), config, cache_dtype=cache_dtype)
    assert set(registry._registrations) == {
        triton_decode.ATTEND_KERNEL,
        merge_parts.MERGE_KERNEL,
        compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL,
        indexer._PREPARE_UNIFORM_DECODE_KERNEL,
        indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL,
    }
    (arguments,) = registry._registrations[triton_decode.ATTEND_KERNEL]
    keys = triton_decode.ATTEND_KERNEL.get_warmup_keys(*arguments[0], **arguments[1])
    assert {(k.cache_dtype, k.latent_dim, k.rotary_dim) for k in keys} == {(dtype, 512, 64)}
    rows = 2048 // 8
    assert {k.tiling.heads for k in keys} == {t.heads for t in tilings_of(64, rows)}


def test_layers_of_ours_have_the_index_conversion_warmed_and_others_as_stock_says():
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.v1.attention.backends.mla.flashattn_mla_sparse import FlashAttnMLASparseBackend
    from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
        FlashInferMLASparseTRTLLMBackend,
    )

    made()
    wrapped = MLAAttention._uses_flat_kv_cache
    made()
    assert MLAAttention._uses_flat_kv_cache is wrapped
    answers = [
        wrapped(SimpleNamespace(attn_backend=b, kv_cache_dtype="auto"))
        for b in (backend(), FlashAttnMLASparseBackend, FlashInferMLASparseTRTLLMBackend)
    ]
    assert answers == [True, False, True]


def test_ranks_compare_what_they_decided():
    with mock.patch("vllm_dcp_mla.agreement.check") as check, with_kernels(triton_decode=Leaves()):
        made("fp8_e4m3", settings={"kernel": "auto"}, model="deepseek-v3.2")
    assert check.call_args.kwargs == {
        "backend": "DcpFlashAttnMLASparseImpl",
        "kernel": "leaves",
        "heads": 128,
        "gather_rows": 0,
        "kv_cache_dtype": "fp8_e4m3",
    }


def test_decodes_of_several_tokens_stay_decodes():
    from vllm.v1.attention.backends.mla.flashattn_mla_sparse import (
        FlashAttnMLASparseMetadataBuilder,
    )
    from vllm.v1.attention.ops.dcp import MLADCPManager
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    layer = SimpleNamespace(
        prefill_backend=None,
        dcp_manager=MLADCPManager.__new__(MLADCPManager),
        impl=SimpleNamespace(widens_keys=False),
    )
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    thresholds = []
    with (
        engine(settings=TRITON) as config,
        mock.patch(
            "vllm.model_executor.layers.attention.sparse_mla_attention.get_dcp_group",
            lambda: SimpleNamespace(world_size=8, rank_in_group=0),
        ),
    ):
        config.compilation_config.static_forward_context["l"] = layer
        for cls in (FlashAttnMLASparseMetadataBuilder, backend().get_builder_cls()):
            builder = cls(spec, ["l"], config, torch.device("cpu"))
            thresholds.append(builder.reorder_batch_threshold)
            assert not builder.supports_draft_decode_metadata_update
    assert thresholds == [1, 256]


def test_what_vllm_reads_off_the_class():
    impl = backend().get_impl_cls()
    assert impl.supports_mtp_with_cp_non_trivial_interleave_size
    assert impl.can_return_lse_for_decode
    assert not impl.supports_quant_query_input
    assert backend().supports_dcp()
    assert backend().get_name() == "FLASH_ATTN_MLA_SPARSE"
    assert not backend().supports_dtype(torch.float16)
