"""Keys under PCP with DCP: exchanged as they are cached, byte for byte what one rank caches."""

import functools
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from backend_engine import engine, make_impl  # noqa: E402

from release_marks import gathers_here  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("cpu_vllm", "no_buffers"),
    gathers_here,
]

LATENT, ROPE, INDEX, HIDDEN = 512, 64, 128, 96
KEY_BYTES = INDEX + 4
BLOCK, BLOCKS = 16, 9
PREFIX = "model.layers.0.self_attn.indexer.k_cache"


@pytest.fixture
def attention(monkeypatch):
    """vLLM's module of the model, to wrap; stock's functions come back after the test."""
    from vllm.models.deepseek_v32 import attention

    for name in ("fused_norm_rope", "sparse_attn_indexer"):
        monkeypatch.setattr(attention, name, getattr(attention, name))
    monkeypatch.setattr(attention.DeepseekV32Attention, "forward", lambda self, work: work())
    return attention


def layer(dtype, *, exchanges=True, indexer=True):
    return SimpleNamespace(
        impl=SimpleNamespace(exchanges_cached_rows=exchanges),
        indexer=SimpleNamespace(k_cache=SimpleNamespace(prefix=PREFIX)) if indexer else None,
        kv_cache_dtype=dtype,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        _k_scale=torch.tensor([0.37]),
    )


def poisoned(*shape, dtype=torch.bfloat16):
    return torch.full(shape, torch.nan).to(dtype)


def bytes_of(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def norm_rope(function, tokens, dtype, *, indexer=True, **cached):
    """Stock's fused kernel on random inputs, the same each time; what it wrote for the exchange."""
    generator = torch.Generator().manual_seed(tokens)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    angles = torch.arange(tokens)[:, None] * 1e6 ** -(torch.arange(0, ROPE, 2) / ROPE)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    norm = (1 + 0.1 * draw(INDEX), 0.1 * draw(INDEX), 1e-6, table)
    written = {
        "kv_c_out": poisoned(tokens, LATENT),
        "k_pe_out": poisoned(tokens, ROPE),
        "index_k_out": poisoned(tokens, INDEX) if indexer else None,
    }
    query = function(
        torch.arange(tokens),
        draw(tokens, 64).bfloat16(),
        torch.ones(64).bfloat16(),
        1e-6,
        # Parts of a projection, as in the model: not contiguous.
        draw(tokens, LATENT + HIDDEN).bfloat16()[:, :LATENT],
        torch.ones(LATENT).bfloat16(),
        1e-6,
        draw(tokens, ROPE).bfloat16(),
        table,
        draw(tokens, INDEX + HIDDEN).bfloat16()[:, :INDEX] if indexer else None,
        *(norm if indexer else (None, None, 1e-6, None)),
        torch.empty(tokens, 256, dtype=torch.int32),
        mla_kv_cache_dtype=dtype,
        has_indexer=indexer,
        index_rope_interleave=True,
        **{**written, **cached},
    )
    return query, written


def through(attention, one, tokens, dtype, **options):
    """What the wrapped kernel writes while a layer's forward runs."""
    from vllm_dcp_mla.backends import cached_rows

    assert cached_rows.install()
    work = functools.partial(norm_rope, attention.fused_norm_rope, tokens, dtype, **options)
    return attention.DeepseekV32Attention.forward(one, work)


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8", "bfloat16"])
def test_caches_hold_what_one_rank_caches(attention, dtype, tokens):
    stock, fp8 = attention.fused_norm_rope, dtype != "bfloat16"
    one = layer(dtype)
    slots = torch.randperm(BLOCK * BLOCKS)[:tokens]
    width = LATENT + ROPE
    expected = (bytes_of(BLOCKS, BLOCK, width), bytes_of(BLOCKS, BLOCK, KEY_BYTES))
    found = tuple(cache.clone() for cache in expected)
    query, exact = norm_rope(
        stock, tokens, dtype, slot_mapping=slots, indexer_k_cache=expected[1],
        mla_kv_cache=expected[0] if fp8 else None, mla_k_scale=one._k_scale, index_k_out=None,
    )  # fmt: skip
    same_query, written = through(attention, one, tokens, dtype)
    from vllm_dcp_mla.kernels.store_rows import store_rows

    assert torch.equal(query, same_query)
    store_rows(written["index_k_out"], found[1], slots, scale_bytes=4)
    if fp8:
        store_rows(written["kv_c_out"], found[0], slots)
    else:  # a bf16 row is rounded once by stock
        for name in ("kv_c_out", "k_pe_out"):
            assert torch.equal(written[name], exact[name])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_layer_that_shares_its_indexers_keys_has_rows_only(attention):
    stock = attention.fused_norm_rope
    expected, slots = bytes_of(BLOCKS, BLOCK, LATENT + ROPE), torch.arange(20)
    one = layer("fp8_e4m3", indexer=False)
    norm_rope(
        stock, 20, "fp8_e4m3", indexer=False, slot_mapping=slots, mla_kv_cache=expected,
        mla_k_scale=one._k_scale,
    )  # fmt: skip
    _, written = through(attention, one, 20, "fp8_e4m3", indexer=False)
    rows = written["kv_c_out"].view(torch.uint8)[:, : LATENT + ROPE]
    assert torch.equal(rows, expected.flatten(0, 1)[:20])


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "bfloat16"])
def test_other_layers_write_what_stock_writes(attention, dtype):
    _, expected = norm_rope(attention.fused_norm_rope, 7, dtype)
    _, written = through(attention, layer(dtype, exchanges=False), 7, dtype)
    for name, rows in expected.items():
        assert rows.isfinite().all()
        assert torch.equal(written[name], rows)


def test_installing_again_changes_nothing(attention):
    from vllm_dcp_mla.backends import cached_rows

    cached_rows.install()
    before = (attention.fused_norm_rope, attention.sparse_attn_indexer)
    cached_rows.install()
    assert (attention.fused_norm_rope, attention.sparse_attn_indexer) == before


@pytest.mark.parametrize("decodes", [0, 2, 5])
def test_keys_of_all_ranks_are_stored_as_they_came(attention, monkeypatch, decodes):
    """Two ranks with 5 tokens each; decodes are the same on both."""
    from vllm.v1.attention.ops import pcp

    from vllm_dcp_mla.backends import cached_rows

    told = []
    attention.sparse_attn_indexer = lambda *args, **kwargs: told.append((args, kwargs)) or "top-k"
    cached_rows.install()
    one = layer("bfloat16")
    through(attention, one, 5, "bfloat16")  # which says that keys come as they are cached
    mine, others = bytes_of(5, 256), bytes_of(5, 256)
    group = SimpleNamespace(
        world_size=2,
        all_gather=lambda rows, dim: torch.cat((rows, others.view(torch.bfloat16)[decodes:])),
    )
    for module in (pcp, cached_rows):
        monkeypatch.setattr(module, "get_pcp_group", lambda: group)
    slots = torch.randperm(BLOCK * BLOCKS)[:10]
    slots[8] = -1  # another rank's shard
    metadata = SimpleNamespace(slot_mapping=slots, num_decode_tokens=decodes)
    context = SimpleNamespace(
        attn_metadata={PREFIX: metadata}, no_compile_layers={PREFIX: one.indexer.k_cache}
    )
    monkeypatch.setattr(cached_rows, "get_forward_context", lambda: context)
    cache = bytes_of(BLOCKS, BLOCK, KEY_BYTES)
    before = cache.clone()
    keys = mine.view(torch.bfloat16)
    called = (None, PREFIX, cache, None, None, keys, None)
    options = {"skip_k_cache_insert": False, "pcp_shard_decode_requests": False}
    assert attention.sparse_attn_indexer(*called, **options) == "top-k"
    ((args, kwargs),) = told
    assert args == called
    assert kwargs == {**options, "skip_k_cache_insert": True}
    sent = torch.cat((mine, others[decodes:]))
    own_slots = torch.cat((slots[:5], slots[5 + decodes :])).tolist()
    for key, slot in zip(sent, own_slots, strict=True):
        if slot >= 0:
            block, row = divmod(slot, BLOCK)
            values, scales = cache[block].flatten().split([BLOCK * INDEX, BLOCK * 4])
            assert torch.equal(values.view(BLOCK, INDEX)[row], key[:INDEX])
            assert torch.equal(scales.view(BLOCK, 4)[row], key[INDEX:KEY_BYTES])
    changed = (cache != before).flatten(1).any(1)
    assert set(changed.nonzero().flatten().tolist()) <= {s // BLOCK for s in own_slots if s >= 0}


@pytest.mark.parametrize("metadata", [None, {PREFIX: SimpleNamespace()}])
def test_other_indexers_are_left_alone(attention, monkeypatch, metadata):
    """Before there is metadata, and those whose layer exchanges what stock does.

    Another engine of the process may have a layer of the same name.
    """
    from vllm_dcp_mla.backends import cached_rows

    told = []
    attention.sparse_attn_indexer = lambda *args, **kwargs: told.append(kwargs)
    cached_rows.install()
    ours, theirs = layer("fp8_e4m3"), layer("fp8_e4m3", exchanges=False)
    for one in (ours, theirs):
        through(attention, one, 3, "fp8_e4m3")
    caches = {PREFIX: (ours if metadata is None else theirs).indexer.k_cache}
    context = SimpleNamespace(attn_metadata=metadata, no_compile_layers=caches)
    monkeypatch.setattr(cached_rows, "get_forward_context", lambda: context)
    attention.sparse_attn_indexer(
        None, PREFIX, None, None, None, torch.ones(3, INDEX), skip_k_cache_insert=False
    )
    assert told == [{"skip_k_cache_insert": False}]


def test_stock_has_an_index_cache_where_its_mark_is_looked_for(attention):
    from vllm.forward_context import create_forward_context

    with engine(dcp=2, pcp=2) as config:
        cache = attention.DeepseekV32IndexerCache(
            head_dim=KEY_BYTES, dtype=torch.uint8, prefix=PREFIX, cache_config=config.cache_config
        )
        context = create_forward_context({}, config)
    assert context.no_compile_layers[PREFIX] is cache


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize(("row_bytes", "scale_bytes"), [(576, 0), (128, 4), (64, 8)])
def test_rows_are_stored_at_their_slots(row_bytes, scale_bytes, tokens):
    from vllm_dcp_mla.kernels.store_rows import store_rows

    width = row_bytes + scale_bytes
    # Blocks lie apart, and rows are the first bytes of longer ones.
    cache = bytes_of(BLOCKS, 3, BLOCK, width)[:, 1]
    rows = bytes_of(tokens, 1024).view(torch.bfloat16)
    slots = torch.randperm(BLOCK * BLOCKS)[:tokens]
    slots[tokens // 2] = -1
    before, expected = cache.clone(), cache.clone()
    for row, slot in zip(rows.view(torch.uint8), slots.tolist(), strict=True):
        if slot >= 0:
            block, inside = divmod(slot, BLOCK)
            flat = expected[block].view(-1)
            flat[inside * row_bytes :][:row_bytes] = row[:row_bytes]
            scales = flat[BLOCK * row_bytes + inside * scale_bytes :]
            scales[:scale_bytes] = row[row_bytes:width]
    store_rows(rows, cache, slots, scale_bytes=scale_bytes)
    assert torch.equal(cache, expected)
    store_rows(rows[:0], cache, slots[:0])
    padded = torch.cat((rows, bytes_of(3, 1024).view(torch.bfloat16)))
    cache.copy_(before)
    store_rows(padded, cache, slots, scale_bytes=scale_bytes)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("module", "name", "kernel"),
    [
        ("trtllm", "DcpFlashInferMLASparseBackend", "reference"),
        ("hopper", "DcpFlashAttnMLASparseBackend", "triton_decode"),
    ],
)
@pytest.mark.parametrize("cache_dtype", ["fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize(
    ("settings", "sizes", "exchanges"),
    [
        ({}, {"dcp": 2, "pcp": 2}, True),
        ({"pcp_cached_rows": False}, {"dcp": 2, "pcp": 2}, False),
        ({}, {"dcp": 2}, False),
    ],
)
def test_which_implementations_store_bytes(
    attention, monkeypatch, module, name, kernel, cache_dtype, settings, sizes, exchanges
):
    from importlib import import_module

    from vllm import _custom_ops

    backend = getattr(import_module(f"vllm_dcp_mla.backends.{module}"), name)
    with engine(**sizes, settings={"kernel": kernel, **settings}) as config:
        impl = make_impl(backend, config, cache_dtype=cache_dtype)
    assert impl.exchanges_cached_rows is exchanges
    converted = []
    monkeypatch.setattr(
        _custom_ops, "concat_and_cache_mla", lambda *args, **kwargs: converted.append(args[0])
    )
    rows, cache = bytes_of(3, 1024).view(torch.bfloat16), bytes_of(BLOCKS, BLOCK, 576)
    update = functools.partial(
        impl.do_kv_cache_update,
        *(rows, torch.ones(3, 1, ROPE), cache, torch.arange(3), cache_dtype, torch.ones(1), False),
    )
    update()  # by a layer whose forward is not the one that is wrapped
    assert len(converted) == 1
    assert converted.pop() is rows
    one = layer(cache_dtype)
    one.impl = impl
    through(attention, one, 3, cache_dtype)
    update()
    if exchanges and cache_dtype == "fp8_e4m3":
        assert not converted
        assert torch.equal(cache.flatten(0, 1)[:3], rows.view(torch.uint8)[:, :576])
    else:
        assert len(converted) == 1
        assert converted[0] is rows
