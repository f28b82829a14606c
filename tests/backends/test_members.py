"""What a registry name resolves to: ours under DCP, stock's otherwise."""

from types import SimpleNamespace
from unittest import mock

import pytest

from release_marks import has_flash_attn_4, serves_hopper
from vllm_dcp_mla.compat.releases import RELEASES

pytest.importorskip("torch")
pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm")]

NAMES = (
    "FlashInferMLASparse",
    pytest.param("FlashAttnMLASparseFA4", marks=has_flash_attn_4),
    pytest.param("FlashAttnMLASparse", marks=serves_hopper),
    "FlashMLASparse",
    "DcpMlaSparse",
)


def resolve(name, dcp=None, settings=None):
    from vllm_dcp_mla.backends import members

    config = None
    if dcp is not None:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
            additional_config={"dcp_mla": settings or {}},
        )
    with mock.patch("vllm.config.get_current_vllm_config_or_none", lambda: config):
        return getattr(members, name)


@pytest.mark.parametrize("name", NAMES)
def test_with_dcp_it_is_ours(name):
    cls = resolve(name, dcp=2)
    assert cls.__module__.startswith("vllm_dcp_mla.")
    assert getattr(__import__(cls.__module__, fromlist=["x"]), cls.__qualname__) is cls


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("settings", [{}, {"kernel": "trtllm_gen"}])
def test_without_dcp_it_is_stocks(name, settings):
    assert resolve(name, dcp=1, settings=settings).__module__.startswith("vllm.v1.")


@pytest.mark.parametrize("name", NAMES)
def test_a_switched_off_engine_gets_stocks(name):
    assert resolve(name, dcp=8, settings={"disable": True}).__module__.startswith("vllm.v1.")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("FlashInferMLASparse", "vllm_dcp_mla.backends.trtllm"),
        ("DcpMlaSparse", "vllm_dcp_mla.backends.trtllm"),
        pytest.param(
            "FlashAttnMLASparse",
            "vllm.v1.attention.backends.mla.flashattn_mla_sparse",
            marks=serves_hopper,
        ),
        ("FlashMLASparse", "vllm.v1.attention.backends.mla.flashmla_sparse"),
    ],
)
def test_where_the_reference_kernel_is_ours_without_dcp_too(name, module):
    assert resolve(name, dcp=1, settings={"kernel": "reference"}).__module__ == module


@pytest.mark.parametrize(
    ("arch", "kernel", "module"),
    [
        pytest.param((9, 0), "auto", "hopper", marks=serves_hopper),
        ((10, 0), "auto", "trtllm"),
        ((10, 3), "auto", "trtllm"),
        (None, "auto", "trtllm"),
        # A kernel that is forced says which class it is, on any device.
        ((9, 0), "reference", "trtllm"),
        ((9, 0), "trtllm_gen", "trtllm"),
        pytest.param((10, 0), "triton_decode", "hopper", marks=serves_hopper),
        pytest.param((9, 0), "flashmla", "hopper", marks=serves_hopper),
    ],
)
def test_the_alias_is_the_class_of_this_gpu_or_of_the_forced_kernel(arch, kernel, module):
    import vllm.platforms

    found = SimpleNamespace(major=arch[0], minor=arch[1]) if arch else None
    platform = SimpleNamespace(get_device_capability=lambda: found)
    with mock.patch.object(vllm.platforms, "_current_platform", platform):
        cls = resolve("DcpMlaSparse", dcp=2, settings={"kernel": kernel})
    assert cls.__module__ == f"vllm_dcp_mla.backends.{module}"


@pytest.mark.parametrize("kernel", ["auto", "flashmla"])
def test_where_hopper_is_left_to_stock_the_alias_is_the_class_that_refuses_it(kernel):
    import vllm.platforms

    platform = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(major=9, minor=0))
    with (
        mock.patch.object(vllm.platforms, "_current_platform", platform),
        mock.patch("vllm_dcp_mla.backends.members.installed_release", lambda: RELEASES[-2]),
    ):
        cls = resolve("DcpMlaSparse", dcp=2, settings={"kernel": kernel})
    assert cls.__module__ == "vllm_dcp_mla.backends.trtllm"


@pytest.mark.parametrize("name", NAMES)
def test_names_stay_stocks(name):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert resolve(name, dcp=2).get_name() == resolve(name, dcp=1).get_name()
    assert resolve(name, dcp=2).get_name() in AttentionBackendEnum.__members__


@pytest.mark.parametrize(("dcp", "installed"), [(2, True), (1, False)])
@pytest.mark.parametrize("name", NAMES)
def test_the_indexers_patches_come_with_the_first_class_of_ours(name, dcp, installed):
    with mock.patch("vllm_dcp_mla.indexer.hooks.install") as install:
        resolve(name, dcp=dcp)
    assert bool(install.call_count) is installed


def test_an_unknown_name_is_an_attribute_error():
    from vllm_dcp_mla.backends import members

    with pytest.raises(AttributeError, match="Nothing"):
        members.Nothing  # noqa: B018


@pytest.mark.parametrize("name", NAMES[:3])
def test_dcp_is_declared(name):
    backend = resolve(name, dcp=2)
    assert backend.get_impl_cls().supports_dcp
    assert getattr(backend, "supports_dcp", lambda: True)()  # asked from 0.30 on
