import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dcp_mla.rehearse import soak, workload
from vllm_dcp_mla.rehearse.config import INDEX_TOPK, MAX_MODEL_LEN, VOCAB_SIZE
from vllm_dcp_mla.rehearse.requests import Requests
from vllm_dcp_mla.rehearse.workload import length_classes, max_model_len, prompts, scored_tokens

BLOCK = 64


def common_prefix(left, right):
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
        min(len(left), len(right)),
    )


@settings(max_examples=8)
@given(
    st.sampled_from(INDEX_TOPK),
    st.integers(1, 8),
    st.integers(8, 40),
    st.integers(0, 1000),
)
def test_prompts_fill_their_classes(index_topk, ranks, per_class, seed):
    made = prompts(index_topk, VOCAB_SIZE, ranks, per_class=per_class, seed=seed)
    bands = length_classes(index_topk)
    assert {p.length_class for p in made} == {band.name for band in bands}
    for band in bands:
        lengths = [len(p.tokens) for p in made if p.length_class == band.name]
        assert len(lengths) == per_class
        assert all(band.shortest <= length <= band.longest for length in lengths)
        assert max(lengths) == band.longest, "the edge of a class is served"
        late = [p for p in made if p.length_class == band.name and p.wave == 1]
        assert len(late) == per_class // 4
    assert all(1 <= token < VOCAB_SIZE for p in made for token in p.tokens)
    assert workload.FORCED_TOKEN not in {token for p in made for token in p.tokens}
    assert [p.wave for p in made] == sorted(p.wave for p in made)


@settings(max_examples=8)
@given(st.sampled_from(INDEX_TOPK), st.integers(2, 64))
def test_one_prompt_is_shorter_than_the_ranks(index_topk, ranks):
    lengths = [len(p.tokens) for p in prompts(index_topk, VOCAB_SIZE, ranks)]
    assert 1 in lengths
    assert ranks - 1 in lengths
    assert index_topk in lengths


@settings(max_examples=8)
@given(st.sampled_from(INDEX_TOPK), st.integers(0, 50))
def test_the_second_wave_repeats_whole_blocks_of_the_first(index_topk, seed):
    made = prompts(index_topk, VOCAB_SIZE, 4, seed=seed)
    first = [p for p in made if p.wave == 0]
    for late in (p for p in made if p.wave == 1):
        shared = max(
            common_prefix(late.tokens, p.tokens)
            for p in first
            if p.length_class == late.length_class
        )
        assert shared >= int(0.75 * len(late.tokens))
        assert shared < len(late.tokens), "something is left to prefill"
        if len(late.tokens) > index_topk:
            assert shared >= 5 * BLOCK


def test_at_least_one_short_prompt_reuses_a_block():
    """Of those that every rehearsal serves: the seed is fixed."""
    for index_topk in INDEX_TOPK:
        made = prompts(index_topk, VOCAB_SIZE, 2)
        short = length_classes(index_topk)[0].name
        late = [p for p in made if p.wave == 1 and p.length_class == short]
        assert any(0.75 * len(p.tokens) >= BLOCK for p in late)


def test_prompts_are_the_same_each_time():
    assert prompts(512, VOCAB_SIZE, 2) == prompts(512, VOCAB_SIZE, 2)
    assert prompts(512, VOCAB_SIZE, 2) != prompts(512, VOCAB_SIZE, 2, seed=1)
    assert scored_tokens(VOCAB_SIZE) == scored_tokens(VOCAB_SIZE)


def test_short_and_long_prompts_meet_in_one_batch():
    first = [p.length_class for p in prompts(512, VOCAB_SIZE, 2)[:16]]
    assert len(set(first)) == 3


def test_long_prompts_come_last_and_fit():
    made = prompts(512, 2048, 2, long_tokens=131072)
    assert made[:-2] == prompts(512, 2048, 2)
    assert [(p.length_class, len(p.tokens), p.wave) for p in made[-2:]] == [
        ("of 131072", 131072, 2)
    ] * 2
    assert made[-1].tokens != made[-2].tokens
    assert max_model_len(512, 131072) >= 131072 + workload.GENERATED_TOKENS
    assert max_model_len(512, 100) == max_model_len(512)


def test_a_class_of_seven_is_refused():
    with pytest.raises(ValueError, match="per_class is 7; a class needs 8"):
        prompts(512, VOCAB_SIZE, 2, per_class=7)


def test_scored_tokens_are_distinct_and_ascending():
    scored = scored_tokens(VOCAB_SIZE)
    assert len(scored) == workload.SCORED_TOKENS == len(set(scored))
    assert scored == sorted(scored)
    assert 0 <= scored[0] <= scored[-1] < VOCAB_SIZE


@pytest.mark.parametrize("index_topk", INDEX_TOPK)
@pytest.mark.parametrize("generated", [workload.GENERATED_TOKENS, soak.GENERATED_TOKENS])
def test_the_longest_request_fits(index_topk, generated):
    limit = max_model_len(index_topk)
    assert length_classes(index_topk)[-1].longest + generated <= limit <= MAX_MODEL_LEN
    assert limit % BLOCK == 0


def test_requests_keep_prompts_and_waves():
    made = prompts(512, VOCAB_SIZE, 2)
    asked = Requests.of(made, VOCAB_SIZE, 64)
    assert asked.prompts == [list(p.tokens) for p in made]
    assert (asked.forced, asked.generated) == (workload.FORCED_TOKEN, 64)
    waves = asked.waves()
    assert [index for wave in waves for index in wave] == list(range(len(made)))
    assert [{made[i].wave for i in wave} for wave in waves] == [{0}, {1}]
    assert Requests.model_validate_json(asked.model_dump_json()) == asked
