"""The SM100 classes, built as vLLM builds them, on the CPU with the reference kernel."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
from backend_engine import (  # noqa: E402
    LAYER,
    MEMBERS,
    backends,
    engine,
    expected,
    make_impl,
    run,
)
from kernel_call import call_kernel  # noqa: E402

from release_marks import SIZES_WORKSPACE, has_flash_attn_4  # noqa: E402
from vllm_dcp_mla import device_buffer  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm", "no_buffers")]


HEADS = {"glm-5.2": 64, "deepseek-v3.2": 128}


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("model", ["glm-5.2", "deepseek-v3.2"])
def test_workspace_is_bounded_whatever_the_step(member, model):
    with engine(max_tokens=32_768, model=model) as config:
        impl = make_impl(backends()[member], config)
    (buffers,) = device_buffer._BY_DEVICE.values()
    assert buffers.workspace.numel() == 951_058_432
    assert (
        impl._plans[HEADS[model]].num_heads
        == config.model_config.hf_text_config.num_attention_heads
    )
    assert impl._plans[HEADS[model]].tokens_per_launch == 4096 * 64 // HEADS[model]


def test_both_members_and_every_layer_share_one_buffer():
    with engine() as config:
        first = [make_impl(b, config) for b in backends() for _ in range(2)]
    assert len(device_buffer._BY_DEVICE) == 1
    assert len({impl._buffers.workspace.data_ptr() for impl in first}) == 1


@pytest.mark.parametrize("member", MEMBERS)
def test_mtp_works_with_any_interleave(member):
    assert backends()[member].get_impl_cls().supports_mtp_with_cp_non_trivial_interleave_size


@pytest.mark.parametrize("member", MEMBERS)
def test_lse_has_the_base_that_the_class_declares(member):
    with engine() as config:
        impl = make_impl(backends()[member], config)
        assert impl.lse_base_on_e is (member == 1)
        *inputs, out, lse = run(impl)
    wanted, natural = expected(*inputs, 0.05, 1.0)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=2e-3)
    unit = 1.0 if member == 1 else math.log(2)
    torch.testing.assert_close(lse.double() * unit, natural, rtol=1e-5, atol=1e-5)
    assert not out[0].any()
    assert torch.equal(lse[0], torch.full((64,), -math.inf))


def test_a_bf16_cache_ignores_the_checkpoints_scales_and_fp8_uses_them():
    with engine() as config:
        for dtype, name, scale, value in (
            (torch.bfloat16, "bfloat16", 0.05, 1.0),
            (torch.float8_e4m3fn, "fp8_e4m3", 0.05 * 3 * 5, 5.0),
        ):
            impl = make_impl(backends()[0], config, cache_dtype=name)
            *inputs, out, lse = run(impl, dtype=dtype)
            wanted, natural = expected(*inputs, scale, value)
            torch.testing.assert_close(out.double(), wanted, rtol=2**-7, atol=1e-2)
            torch.testing.assert_close(lse.double() * math.log(2), natural, rtol=1e-5, atol=1e-4)


def test_an_fp8_cache_stored_as_bytes_is_viewed_as_fp8():
    with engine() as config:
        impl = make_impl(backends()[0], config, cache_dtype="fp8_e4m3")
        call = {"layer": LAYER, "block_size": 64}
        query = torch.randn(1, 64, 576).to(torch.float8_e4m3fn)
        cache = torch.randn(2, 64, 576).to(torch.float8_e4m3fn)
        topk, counts = torch.zeros(1, 128, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        out = [
            call_kernel(impl, query, c, topk, counts, **call)[0]
            for c in (cache, cache.view(torch.uint8))
        ]
    assert torch.equal(out[0], out[1])


def test_tokens_are_split_to_fit():
    one_row = 64 * 2048
    with engine(settings={"slab_limit_bytes": 3 * one_row + (1 << 20)}) as config:
        impl = make_impl(backends()[0], config)
        assert impl._plans[64].tokens_per_launch == 3
        launches = spy_on_launches(impl)
        run(impl, tokens=8, counts=(1,) * 8)
    assert launches == [3, 3, 2]


def test_heads_that_were_not_planned_for_are_planned_at_once():
    one_row = 64 * 2048
    with engine(settings={"slab_limit_bytes": 4 * one_row + (1 << 20)}) as config:
        impl = make_impl(backends()[0], config)
        launches = spy_on_launches(impl)
        *_, out, lse = run(impl, heads=128)
    assert launches == [2, 2]
    assert out.shape == (4, 128, 512)
    assert lse.shape == (4, 128)


def test_an_engine_installs_the_patches_it_needs():
    with (
        engine() as config,
        mock.patch("vllm_dcp_mla.compat.sleep.install") as sleep,
        mock.patch("vllm_dcp_mla.compat.a2a.install") as a2a,
        mock.patch("vllm_dcp_mla.compat.empty_mask.install") as empty_mask,
    ):
        make_impl(backends()[0], config)
    assert sleep.call_count == a2a.call_count == empty_mask.call_count == 1


def spy_on_launches(impl):
    """The rows of each launch from now on."""
    launches, real = [], impl._kernel.launch

    def launch(batch, buffers):
        launches.append(len(batch.query))
        real(batch, buffers)

    impl._kernel.launch = launch
    return launches


def test_a_nope_model_with_empty_rows():
    with engine() as config:
        impl = make_impl(backends()[0], config, dims=(256, 0))
        *inputs, out, lse = run(impl, dim=512)
    wanted, natural = expected(*inputs, 0.05, 1.0)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=2e-3)
    torch.testing.assert_close(lse.double() * math.log(2), natural, rtol=1e-5, atol=1e-5)


def test_a_cache_whose_blocks_are_apart():
    with engine() as config:
        impl = make_impl(backends()[0], config)
        query = torch.randn(2, 64, 576).bfloat16()
        wide = torch.full((3, 192, 576), float("nan"), dtype=torch.bfloat16)
        wide[:, :64] = torch.randn(3, 64, 576).bfloat16()
        topk = torch.full((2, 128), -1, dtype=torch.int32)
        topk[0, :2] = torch.tensor([0, 2 * 192 + 5])  # block 2 starts two block strides on
        topk[1, :1] = 192 + 63
        counts = torch.tensor([2, 1], dtype=torch.int32)
        out, _ = call_kernel(impl, query, wide[:, :64], topk, counts, layer=LAYER, block_size=64)
    wanted, _ = expected(query, wide.view(-1, 576), topk, counts, 0.05, 1.0)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-7, atol=1e-2)


@has_flash_attn_4
def test_fa4_decodes_with_flash_attention_and_prefills_with_trtllm_gen():
    from vllm.v1.attention.backends.mla.flashattn_mla_sparse import FlashAttnMLASparseFA4Impl

    with engine() as config:
        impl = make_impl(backends()[1], config)
        impl.kernel_is_forced = False
        garbage = (torch.full((4, 64, 512), math.nan), torch.full((4, 64), math.nan))
        with mock.patch.object(
            FlashAttnMLASparseFA4Impl, "_forward_mqa_kernel", return_value=garbage
        ) as stock:
            *_, out, lse = run(impl, is_decode=True)
            assert stock.call_count == 1
            assert not out[0].any()
            assert torch.equal(lse[0], torch.full((64,), -math.inf))
            *_, out, lse = run(impl, is_decode=False)
            assert stock.call_count == 1
    assert not out.isnan().any()


def test_builders_allocate_no_slab_and_keep_stocks_properties():
    import vllm.v1.attention.backends.mla.flashinfer_mla_sparse as stock
    from vllm.v1.attention.ops.dcp import MLADCPManager
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    manager = MLADCPManager.__new__(MLADCPManager)
    layer = SimpleNamespace(prefill_backend=None, dcp_manager=manager)
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    group = SimpleNamespace(world_size=8, rank_in_group=0)
    asked = []
    with (
        engine() as config,
        mock.patch(
            "vllm.model_executor.layers.attention.sparse_mla_attention.get_dcp_group", lambda: group
        ),
        mock.patch.object(stock, "_get_workspace_buffer", lambda *args: asked.append(args)),
    ):
        config.compilation_config.static_forward_context["l"] = layer
        made = {}
        for name, cls in (
            ("stock", stock.FlashInferMLASparseTRTLLMMetadataBuilder),
            *((b.__name__, b.get_builder_cls()) for b in backends()),
        ):
            asked.clear()
            builder = cls(spec, ["l"], config, torch.device("cpu"))
            made[name] = (
                builder.reorder_batch_threshold,
                # Some series lack the last ones.
                getattr(builder, "supports_draft_decode_metadata_update", None),
                cls.get_cudagraph_support(config, spec),
                getattr(cls, "get_varlen_cudagraph_max_query_len", lambda *_: None)(config, spec),
            )
            assert bool(asked) is (name == "stock" and SIZES_WORKSPACE)
    assert len(set(made.values())) == 1, made


def test_users_workspace_size_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "2GiB")
    with (
        engine() as config,
        pytest.raises(ValueError, match="VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"),
    ):
        make_impl(backends()[0], config)
