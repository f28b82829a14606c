"""Which builders are ours: those of GLM-5.x and DeepSeek-V3.2 under DCP, and no others."""

from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
from indexer_batches import builder, common_metadata  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm")]


def test_other_backends_keep_their_builders():
    import vllm.model_executor.models.deepseek_v2 as deepseek_v2
    from vllm.v1.attention.backends.mla import indexer

    from vllm_dcp_mla.indexer import hooks
    from vllm_dcp_mla.indexer.builder import DcpIndexerBuilder

    hooks.install()
    cache = deepseek_v2.DeepseekV32IndexerCache
    assert cache.get_attn_backend(SimpleNamespace()).get_builder_cls() is DcpIndexerBuilder
    assert cache.get_attn_backend(SimpleNamespace()).get_name() == "DEEPSEEK_V32_INDEXER"
    stock = indexer.DeepseekV32IndexerMetadataBuilder
    others = [name for name in vars(indexer) if name.endswith("IndexerBackend")]
    assert {"DeepseekV32IndexerBackend", "DeepseekV4IndexerBackend"} <= set(others)
    for name in others:
        assert getattr(indexer, name).get_builder_cls() is stock, name
    if hasattr(indexer, "KpoolTailBackend"):  # from 0.30 on
        assert indexer.KpoolTailBackend.get_builder_cls() is indexer.KpoolTailMetadataBuilder


def test_installing_again_changes_nothing():
    from vllm.v1.attention.backends.mla import indexer

    from vllm_dcp_mla.indexer import hooks

    import vllm.model_executor.models.deepseek_v2  # noqa: F401  isort: skip

    hooks.install()
    before = (indexer.build_prefill_chunk_metadata, indexer.get_paged_mqa_logits_metadata)
    hooks.install()
    assert before == (indexer.build_prefill_chunk_metadata, indexer.get_paged_mqa_logits_metadata)


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        ({"ours": True}, True),
        ({"ours": False}, False),
        ({"ours": True, "dcp": 1}, False),
        ({"ours": True, "settings": {"disable": True}}, False),
    ],
)
def test_chunks_come_from_us_only_while_our_build_runs(arguments, ours):
    with (
        mock.patch(
            "vllm_dcp_mla.indexer.chunks.ChunkBuild.chunk_metadata", return_value=None
        ) as chunk,
        builder(**arguments) as made,
    ):
        chunks = made.build(0, common_metadata([70, 90], [60, 80], 0, 0, 4)).prefill.chunks
    assert bool(chunk.call_count) is ours
    assert bool(chunks) is not ours


def test_a_builder_that_serves_no_dcp_is_stocks():
    built, drafts = [], []
    for ours in (True, False):
        with builder(ours=ours, dcp=1) as made:
            built.append(made.build(0, common_metadata([70, 500], [60, 100], 0, 0, 1)))
            # Older series have no such thing.
            drafts.append(getattr(made, "supports_draft_decode_metadata_update", None))
    assert drafts[0] == drafts[1]
    for a, b in zip(built[0].prefill.chunks, built[1].prefill.chunks, strict=True):
        assert torch.equal(a.cu_seqlen_ke, b.cu_seqlen_ke)
        assert getattr(a, "max_seqlen_k", None) == getattr(b, "max_seqlen_k", None)
