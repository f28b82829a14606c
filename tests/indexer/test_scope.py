"""Which engines our indexer metadata is for; needs neither torch nor vLLM."""

from types import SimpleNamespace

import pytest

from vllm_dcp_mla.indexer import scope


def config(model_type="glm_moe_dsa", dcp=2, settings=None):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(model_type=model_type)),
        additional_config={"dcp_mla": settings or {}},
    )


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32", "deepseek_mtp"])
def test_served(model_type):
    assert scope.serves(config(model_type))


@pytest.mark.parametrize(
    "other",
    [
        config(dcp=1),
        config("hy_v4"),
        config("deepseek_v4"),
        config("glm5_next"),
        config(settings={"disable": True}),
        SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=2), model_config=None
        ),
    ],
)
def test_left_alone(other):
    assert not scope.serves(other)


def test_a_build_within_itself_is_refused():
    running = scope.Running(splitter=None, no_work=None)
    for _ in range(2):
        with running:
            with pytest.raises(AssertionError, match="within itself"), running:
                pass
            assert scope.running() is running
        assert scope.running() is None


def test_a_build_that_raises_is_over():
    running = scope.Running(splitter=None, no_work=None)
    for _ in range(2):
        with pytest.raises(KeyError, match="planted"), running:
            raise KeyError("planted")
        assert scope.running() is None
