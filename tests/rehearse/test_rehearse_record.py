"""What ranks keep of made-up steps, put together again, and compared."""

import inspect
import sys
import types
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from vllm_dcp_mla.rehearse import record  # noqa: E402
from vllm_dcp_mla.rehearse.kept import Kept  # noqa: E402
from vllm_dcp_mla.rehearse.record import Recorder, Span, layer_of, spans_of  # noqa: E402
from vllm_dcp_mla.rehearse.requests import Recording  # noqa: E402
from vllm_dcp_mla.rehearse.workload import Prompt, prompts  # noqa: E402

LENGTH, TOPK = 10, 4
#: Where each rank's parts of a prompt begin and end, whole or under PCP2.
WHOLE, PCP2 = [[(0, 10)]], [[(0, 3), (9, 10)], [(3, 6), (6, 9)]]


def batch(parts, number=0):
    """A step of one request's parts, each an entry of the batch as under PCP."""
    lengths = [stop - start for start, stop in parts]
    return SimpleNamespace(
        num_reqs=len(parts),
        req_ids=[f"{number}-a1b2" for _ in parts],
        num_computed_tokens_np=np.array([start for start, _ in parts]),
        # As long as vLLM's buffer, which has more behind.
        query_start_loc_np=np.concatenate(([0], np.cumsum(lengths), [99])),
    )


class Made:
    """One prompt's tensors, by position."""

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(LENGTH, 6, generator=generator).bfloat16()
        self.topk = torch.full((LENGTH, TOPK), -1, dtype=torch.int32)
        for position, row in enumerate(self.topk):
            chosen = torch.randperm(position + 1, generator=generator)[:TOPK]
            row[: len(chosen)] = chosen


def serve(made, parts, recording, *, layer=1, steps=None):
    """A rank's recorder behind steps in which it computed these parts, all in one by default."""
    recorder = Recorder(recording, [LENGTH], 2, False)
    for step in steps or [parts]:
        recorder.begin(batch(step))
        rows = torch.cat([torch.arange(*piece) for piece in step])

        def pick(tensor, rows=rows):
            return torch.cat((tensor[rows], tensor[:1]))  # and padding

        recorder.hidden(layer, pick(made.hidden))
        recorder.selection(layer, pick(made.topk))
    return recorder


RECORDING = Recording(positions=[[3, 5, 9, 13]], whole=[0])


@pytest.mark.parametrize("ranks", [WHOLE, WHOLE * 2, PCP2, [PCP2[0], PCP2[0], PCP2[1], PCP2[1]]])
def test_ranks_put_together_are_the_prompt(tmp_path, ranks):
    made = Made()
    results = []
    for number, parts in enumerate(ranks):
        recorder = serve(made, parts, RECORDING)
        whats = {name.split("/")[2] for name in recorder.tensors}
        assert whats == {"selected", "hidden"}, "what is compared, and nothing else"
        recorder.save(tmp_path / f"{number}")
        results.append({"record": str(tmp_path / f"{number}")})
    kept = Kept.read(results)
    assert sorted(kept.queries()) == [(0, 1, 3), (0, 1, 5), (0, 1, 9)], "13 was not computed"
    for (_, _, position), selected in kept.queries().items():
        assert torch.equal(selected, made.topk[position])
    assert torch.equal(kept.hidden(0, 1, LENGTH), made.hidden)
    assert kept.hidden(0, 0, LENGTH) is None


def test_a_prompt_in_several_steps():
    recorder = serve(Made(), None, RECORDING, steps=[[(0, 4)], [(4, 9)], [(9, 10)]])
    assert torch.equal(Kept.of([recorder.tensors]).hidden(0, 1, LENGTH), Made().hidden)
    without = serve(Made(), None, RECORDING, steps=[[(0, 4)], [(9, 10)]])
    assert Kept.of([without.tensors]).hidden(0, 1, LENGTH) is None, "a part was cached"


def test_only_selections_are_kept_of_other_prompts_and_nothing_of_the_mtp_layer():
    recording = Recording(positions=[[3, 9]], whole=[])
    recorder = serve(Made(), WHOLE[0], recording)
    assert sorted(recorder.tensors) == ["0/1/selected/3", "0/1/selected/9"]
    assert not serve(Made(), WHOLE[0], RECORDING, layer=2).tensors


def test_kept_tensors_are_copies():
    made = Made()
    recorder = Recorder(RECORDING, [LENGTH], 2, False)
    recorder.begin(batch([(0, 10)]))
    recorder.hidden(1, made.hidden)
    recorder.selection(1, made.topk)
    hidden, selected = made.hidden.clone(), made.topk[9].clone()
    made.hidden.fill_(torch.nan)
    made.topk.fill_(99)
    assert torch.equal(recorder.tensors["0/1/hidden/0"], hidden)
    assert torch.equal(recorder.tensors["0/1/selected/9"], selected)


@pytest.mark.parametrize("drafts", [False, True])
def test_decode_steps_are_kept_unless_tokens_are_drafted(drafts):
    recorder = Recorder(RECORDING, [LENGTH], 2, drafts)
    recorder.begin(batch([(13, 14)]))
    recorder.selection(1, torch.arange(TOPK)[None].int())
    recorder.hidden(1, torch.zeros(1, 6))
    if drafts:
        assert recorder.tensors == {}
    else:
        assert list(recorder.tensors) == ["0/1/selected/13"]
        assert recorder.tensors["0/1/selected/13"].tolist() == [0, 1, 2, 3]


def test_spans():
    made = batch([(3, 6), (6, 6), (9, 10)], number=7)
    assert spans_of(made) == [Span(7, 3, 0, 3), Span(7, 9, 3, 4)]
    span = Span(0, 3, 5, 8)
    assert [span.row(position) for position in (2, 3, 5, 6)] == [None, 5, 7, None]


def test_of_several_ranks_the_first_one_s_answer_counts():
    first, second = (serve(Made(), WHOLE[0], RECORDING).tensors for _ in range(2))
    second["0/1/selected/5"][0] = 99
    assert torch.equal(Kept.of([first, second]).queries()[0, 1, 5], Made().topk[5])


def test_nothing_kept_is_none():
    assert Kept.read([{}]) is Kept.read([]) is None


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
            prefix = "model.layers.1.self_attn.indexer.k_cache"
            calls.append(attention.sparse_attn_indexer(hidden_states, prefix, "cache", 1, x=2))
            return "attended"

    class GPUModelRunner:
        def prepare_attn(self, input_batch):
            return "tables", "slots"

    attention.DeepseekV32Attention = DeepseekV32Attention
    attention.sparse_attn_indexer = lambda *args, **kwargs: (args, kwargs)
    runner.GPUModelRunner = GPUModelRunner
    step = SimpleNamespace(attn_metadata={"model.layers.1.self_attn.indexer.k_cache": "metadata"})
    context.get_forward_context = lambda: step
    models = types.ModuleType("vllm.models.deepseek_v32")
    models.attention = attention
    for module in (models, attention, runner, context):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return SimpleNamespace(
        layer=DeepseekV32Attention(), runner=GPUModelRunner(), calls=calls, step=step
    )


def test_hooks_see_each_call_and_change_no_answer(stand_in):
    seen = []
    spy = SimpleNamespace(
        **{
            name: lambda *args, name=name: seen.append((name, *args))
            for name in ("begin", "hidden", "selection")
        }
    )
    record.install(spy)
    assert stand_in.runner.prepare_attn("batch") == ("tables", "slots")
    assert stand_in.layer.forward(positions="p", hidden_states="h") == "attended"
    topk = ("h", "model.layers.1.self_attn.indexer.k_cache", "cache", 1), {"x": 2}
    assert stand_in.calls == [topk]
    assert seen == [("begin", "batch"), ("hidden", 1, "h"), ("selection", 1, topk)]
    stand_in.step.attn_metadata = None
    stand_in.layer.forward(positions="p", hidden_states="h")
    assert seen[3:] == [("hidden", 1, "h")], "a step without requests selects nothing"


@pytest.mark.vllm
def test_stock_has_what_is_hooked(cpu_vllm):
    from vllm.models.deepseek_v32 import attention
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    layer = attention.DeepseekV32Attention
    names = lambda function: list(inspect.signature(function).parameters)  # noqa: E731
    assert names(attention.sparse_attn_indexer)[:2] == ["hidden_states", "k_cache_prefix"]
    assert names(layer.forward) == ["self", "positions", "hidden_states"]
    assert names(GPUModelRunner.prepare_attn) == ["self", "input_batch"]
    assert {"num_reqs", "req_ids", "num_computed_tokens_np", "query_start_loc_np"} <= set(
        InputBatch.__dataclass_fields__
    )
