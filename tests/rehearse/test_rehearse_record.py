"""What ranks keep of made-up steps, put together again, and compared."""

import functools
import inspect
import sys
import types
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from vllm_dcp_mla.rehearse import record  # noqa: E402
from vllm_dcp_mla.rehearse.engine import EngineSpec  # noqa: E402
from vllm_dcp_mla.rehearse.kept import Kept  # noqa: E402
from vllm_dcp_mla.rehearse.record import Recorder, Span, layer_of, spans_of  # noqa: E402
from vllm_dcp_mla.rehearse.requests import Recording  # noqa: E402
from vllm_dcp_mla.rehearse.workload import Prompt, prompts  # noqa: E402

LENGTH, TOPK, HEADS, DIM, BLOCK = 10, 4, 2, 8, 4
#: Where each rank's parts of a prompt begin and end, whole or under PCP2.
WHOLE, PCP2 = [[(0, 10)]], [[(0, 3), (9, 10)], [(3, 6), (6, 9)]]


def batch(parts, ends=None, number=0):
    """A step of one request's parts, each an entry of the batch as under PCP."""
    lengths = [stop - start for start, stop in parts]
    pcp = None
    if ends is not None:
        pcp = SimpleNamespace(global_seq_lens_cpu_upper_bound_np=np.full(len(parts), ends))
    return SimpleNamespace(
        num_reqs=len(parts),
        req_ids=[f"{number}-a1b2" for _ in parts],
        num_computed_tokens_np=np.array([start for start, _ in parts]),
        # As long as vLLM's buffer, which has more behind.
        query_start_loc_np=np.concatenate(([0], np.cumsum(lengths), [99])),
        pcp=pcp,
    )


def cache_of(keys, scales, dcp, part):
    """Blocks as vLLM lays them out, of the keys that a rank owns."""
    own, own_scales = keys[part::dcp], scales[part::dcp]
    blocks = torch.zeros(8, BLOCK, DIM + 4, dtype=torch.uint8)
    flat = blocks.view(8, -1)
    for number in range(len(own)):
        block, inside = divmod(number, BLOCK)
        at = flat[block + 2]  # block 0 and 1 are someone else's
        at[inside * DIM : (inside + 1) * DIM] = own[number].view(torch.uint8)
        start = BLOCK * DIM + inside * 4
        at[start : start + 4] = own_scales[number].clone().view(1).view(torch.uint8)
    return blocks


class Made:
    """One prompt's tensors, by position."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        draw = functools.partial(torch.randn, generator=generator)
        self.hidden = draw(LENGTH, 6).bfloat16()
        self.q = draw(LENGTH, HEADS, DIM).to(torch.float8_e4m3fn)
        self.weights, self.output = draw(LENGTH, HEADS), draw(LENGTH, 12)
        self.keys = draw(LENGTH, DIM).to(torch.float8_e4m3fn)
        self.scales = 2 ** draw(LENGTH).round()
        self.topk = torch.full((LENGTH, TOPK), -1, dtype=torch.int32)
        for position, row in enumerate(self.topk):
            chosen = torch.randperm(position + 1, generator=generator)[:TOPK]
            row[: len(chosen)] = chosen


def serve(made, spec, parts, recording, *, part=0, head=0, layer=1, steps=None):
    """A rank's recorder behind steps in which it computed these parts, all in one by default.

    It has a part of the cache and of the heads.
    """
    recorder = Recorder(recording, [LENGTH], 2, False)
    cache = cache_of(made.keys, made.scales, spec.dcp, part)
    for step in steps or [parts]:
        recorder.begin(batch(step, LENGTH if spec.pcp > 1 else None))
        rows = torch.cat([torch.arange(*piece) for piece in step])

        def pick(tensor, rows=rows):
            return torch.cat((tensor[rows], tensor[:1]))  # and padding

        metadata = SimpleNamespace(
            num_decode_tokens=0,
            block_table=torch.arange(2, 6).expand(len(step), 4),
            prefill=SimpleNamespace(
                chunks=[
                    SimpleNamespace(
                        token_start=first,
                        token_end=min(first + 4, len(rows)),
                        cu_seqlen_ks=torch.full((4,), 100),
                        cu_seqlen_ke=100 + rows[first : first + 4] + 1,
                    )
                    for first in range(0, len(rows), 4)
                ]
            ),
        )
        recorder.hidden(layer, pick(made.hidden))
        recorder.selection(
            layer, pick(made.topk), pick(made.q), pick(made.weights), cache, metadata
        )
        recorder.output(layer, pick(made.output.view(LENGTH, spec.tp, -1)[:, head]))
    return recorder


def spec(**sizes):
    return EngineSpec(
        name="x",
        model="/m",
        max_model_len=64,
        max_num_batched_tokens=64,
        kv_cache_bytes=None,
        utilization=0.5,
        **sizes,
    )


RECORDING = Recording(positions=[[3, 5, 9, 13]], whole=[0])


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({}, WHOLE),
        ({"tp": 2}, WHOLE * 2),
        ({"tp": 2, "dcp": 2}, WHOLE * 2),
        ({"pcp": 2}, PCP2),
        ({"pcp": 2, "dcp": 2}, PCP2),
        ({"tp": 2, "pcp": 2, "dcp": 2}, [PCP2[0], PCP2[0], PCP2[1], PCP2[1]]),
    ],
)
def test_ranks_put_together_are_the_prompt(tmp_path, sizes, ranks):
    made, one = Made(), spec(**sizes)
    results = []
    for number, parts in enumerate(ranks):
        part = number // one.tp if one.dcp == one.pcp > 1 else number % one.dcp
        recorder = serve(made, one, parts, RECORDING, part=part, head=number % one.tp)
        recorder.save(tmp_path / f"{number}")
        results.append({"record": str(tmp_path / f"{number}")})
    kept = Kept.read(one, results)
    assert sorted(kept.queries()) == [(0, 1, 3), (0, 1, 5), (0, 1, 9)], "13 was not computed"
    for (_, _, position), selected in kept.queries().items():
        query = (0, 1, position)
        assert torch.equal(selected, made.topk[position])
        assert torch.equal(kept.one("query", query).float(), made.q[position].float())
        assert torch.equal(kept.one("weights", query), made.weights[position])
        assert kept.one("bound", query).tolist() == [position + 1]
        assert torch.equal(kept.output(query), made.output[position])
    assert kept.disagreements() == []
    assert torch.equal(kept.hidden(0, 1, LENGTH), made.hidden)
    keys = kept.index_keys(0, 1, LENGTH, DIM)
    assert torch.equal(keys, made.keys.float() * made.scales[:, None])
    assert kept.hidden(0, 0, LENGTH) is kept.index_keys(0, 0, LENGTH, DIM) is None
    assert kept.output((0, 0, 9)) is kept.one("query", (0, 0, 9)) is None


def test_a_prompt_in_several_steps():
    recorder = serve(Made(), spec(), None, RECORDING, steps=[[(0, 4)], [(4, 9)], [(9, 10)]])
    kept = Kept.of(spec(), [recorder.tensors])
    assert torch.equal(kept.hidden(0, 1, LENGTH), Made().hidden)
    assert torch.equal(
        kept.index_keys(0, 1, LENGTH, DIM), Made().keys.float() * Made().scales[:, None]
    )
    without = serve(Made(), spec(), None, RECORDING, steps=[[(0, 4)], [(9, 10)]])
    assert Kept.of(spec(), [without.tensors]).hidden(0, 1, LENGTH) is None, "a part was cached"


def test_only_selections_are_kept_of_other_prompts_and_nothing_of_the_mtp_layer():
    recording = Recording(positions=[[3, 9]], whole=[])
    recorder = serve(Made(), spec(), WHOLE[0], recording)
    assert sorted(recorder.tensors) == ["0/1/selected/3", "0/1/selected/9"]
    assert not serve(Made(), spec(), WHOLE[0], RECORDING, layer=2).tensors


def test_kept_tensors_are_copies():
    made = Made()
    recorder = Recorder(RECORDING, [LENGTH], 2, False)
    recorder.begin(batch([(0, 10)]))
    recorder.output(1, made.output)
    wanted = made.output[9].clone()
    made.output.fill_(torch.nan)
    assert torch.equal(recorder.tensors["0/1/output/9"], wanted)


@pytest.mark.parametrize("drafts", [False, True])
def test_decode_steps_are_kept_unless_tokens_are_drafted(drafts):
    recorder = Recorder(RECORDING, [LENGTH], 2, drafts)
    recorder.begin(batch([(13, 14)]))
    topk = torch.arange(TOPK)[None].int()
    metadata = SimpleNamespace(
        num_decode_tokens=1, decode=SimpleNamespace(seq_lens=torch.tensor([[14]])), prefill=None
    )
    q, weights = torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS)
    recorder.selection(1, topk, q, weights, torch.zeros(2, BLOCK, DIM + 4), metadata)
    recorder.hidden(1, torch.zeros(1, 6))
    if drafts:
        assert recorder.tensors == {}
    else:
        assert recorder.tensors["0/1/selected/13"].tolist() == [0, 1, 2, 3]
        assert recorder.tensors["0/1/bound/13"].tolist() == [14]
        assert not [name for name in recorder.tensors if "hidden" in name or "index_k" in name]


def test_spans():
    made = batch([(3, 6), (6, 6), (9, 10)], ends=10, number=7)
    assert spans_of(made) == [Span(7, 0, 3, 0, 3, 10), Span(7, 2, 9, 3, 4, 10)]
    assert spans_of(batch([(3, 6)])) == [Span(0, 0, 3, 0, 3, 6)]
    span = Span(0, 0, 3, 5, 8, 6)
    assert [span.row(position) for position in (2, 3, 5, 6)] == [None, 5, 7, None]


def test_ranks_that_disagree_are_named():
    first, second = (serve(Made(), spec(), WHOLE[0], RECORDING).tensors for _ in range(2))
    second["0/1/selected/5"] = second["0/1/selected/5"].flip(0)
    kept = Kept.of(spec(tp=2), [first, second])
    assert kept.disagreements() == [], "order is no matter"
    second["0/1/selected/5"][0] = 99
    assert kept.disagreements() == [(0, 1, 5)]


def test_nothing_kept_is_none():
    assert Kept.read(spec(), [{}]) is Kept.read(spec(), []) is None


def test_the_same_queries_in_every_engine():
    made = prompts(512, 2048, 2)
    recording = Recording.of(made, 512)
    assert len(recording.positions) == len(made)
    for prompt, positions in zip(made, recording.positions, strict=True):
        length = len(prompt.tokens)
        assert {length - 1, length + 3} <= set(positions)
        spread = [p for p in positions if 512 <= p < length - 1]
        assert len(spread) == (min(4, length - 512 - 1) if length > 512 else 0) or length < 520
        assert all(0 <= p < length or p == length + 3 for p in positions)
    chosen = [made[number] for number in recording.whole]
    assert len(chosen) == 12
    assert {prompt.wave for prompt in chosen} == {0}
    assert all(sum(p.length_class == q.length_class for q in chosen) == 4 for p in chosen)
    again = [Prompt("to 4", (1,) * 3, wave) for wave in (1, 0)]
    assert Recording.of(again, 4).whole == [1], "what is cached is not computed"
    assert Recording.of([Prompt("to 4", (1,) * 3, 0)], 4).positions == [[2, 6]]


def test_layers_by_name():
    assert layer_of("model.layers.12.self_attn.indexer.k_cache") == 12


@pytest.fixture
def stand_in(monkeypatch):
    """vLLM's modules with nothing but what is hooked."""
    attention, runner, context = (
        types.ModuleType(name)
        for name in (
            "vllm.models.deepseek_v32.attention",
            "vllm.v1.worker.gpu.model_runner",
            "vllm.forward_context",
        )
    )
    calls = []

    class DeepseekV32Attention:
        layer_name = "model.layers.1.self_attn.attn"

        def forward(self, positions, hidden_states):
            self._sparse_indexer_and_attn(hidden_states, positions, "output")
            return "attended"

        def _sparse_indexer_and_attn(self, q_c, positions, output):
            prefix = "model.layers.1.self_attn.indexer.k_cache"
            calls.append(
                attention.sparse_attn_indexer(q_c, prefix, "cache", "q", None, "k", "w", 1, x=2)
            )

    class GPUModelRunner:
        def prepare_attn(self, input_batch):
            return "tables", "slots"

    attention.DeepseekV32Attention = DeepseekV32Attention
    attention.sparse_attn_indexer = lambda *args, **kwargs: "topk"
    runner.GPUModelRunner = GPUModelRunner
    metadata = {"model.layers.1.self_attn.indexer.k_cache": "metadata"}
    context.get_forward_context = lambda: SimpleNamespace(attn_metadata=metadata)
    models = types.ModuleType("vllm.models.deepseek_v32")
    models.attention = attention
    for module in (models, attention, runner, context):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(layer=DeepseekV32Attention(), runner=GPUModelRunner(), calls=calls)


def test_hooks_see_each_call_and_change_no_answer(stand_in):
    seen = []
    spy = SimpleNamespace(
        **{
            name: lambda *args, name=name: seen.append((name, *args))
            for name in ("begin", "hidden", "selection", "output")
        }
    )
    record.install(spy)
    assert stand_in.runner.prepare_attn("batch") == ("tables", "slots")
    assert stand_in.layer.forward(positions="p", hidden_states="h") == "attended"
    assert stand_in.calls == ["topk"]
    assert seen == [
        ("begin", "batch"),
        ("hidden", 1, "h"),
        ("selection", 1, "topk", "q", "w", "cache", "metadata"),
        ("output", 1, "output"),
    ]


@pytest.mark.vllm
def test_stock_has_what_is_hooked(cpu_vllm):
    from vllm.models.deepseek_v32 import attention
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.pcp_manager import PCPBatchMetadata

    layer = attention.DeepseekV32Attention
    names = lambda function: list(inspect.signature(function).parameters)  # noqa: E731
    assert names(attention.sparse_attn_indexer)[:7] == [
        *("hidden_states", "k_cache_prefix", "kv_cache", "q_quant", "q_scale", "k", "weights")
    ]
    assert names(layer._sparse_indexer_and_attn)[-1] == "output"
    assert names(layer.forward) == ["self", "positions", "hidden_states"]
    assert names(GPUModelRunner.prepare_attn) == ["self", "input_batch"]
    assert {"num_reqs", "req_ids", "num_computed_tokens_np", "query_start_loc_np", "pcp"} <= set(
        InputBatch.__dataclass_fields__
    )
    assert "global_seq_lens_cpu_upper_bound_np" in PCPBatchMetadata.__dataclass_fields__
