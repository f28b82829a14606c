import json
import subprocess
import sys

import pytest

from vllm_dcp_mla.rehearse.config import small_config
from vllm_dcp_mla.rehearse.hf_reference import (
    ANSWER,
    HfReferenceError,
    invalid_because,
    last_log_probs,
)

pytestmark = pytest.mark.vllm  # which brings torch, safetensors and Transformers


def write(folder, config, tensors):
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def prompt(tokens, vocab_size):
    import torch

    draw = torch.Generator().manual_seed(tokens)
    return torch.randint(vocab_size, (tokens,), generator=draw).tolist()


@pytest.mark.parametrize("tokens", [1, 7, 16, 24, 60])
def test_equals_a_plain_float64_model(toy, tmp_path, tokens):
    import plain_model
    import torch

    from vllm_dcp_mla.rehearse.weights import random_weights

    tensors = random_weights(toy, seed=1)
    write(tmp_path, toy, tensors)
    ids, wanted = prompt(tokens, toy["vocab_size"]), list(range(toy["vocab_size"]))
    got = torch.tensor(last_log_probs(tmp_path, [ids], [wanted])[0], dtype=torch.float64)
    torch.testing.assert_close(
        got, plain_model.last_log_probs(toy, tensors, ids), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("fault", ["interleaved", "follow", "select"])
def test_a_wrong_indexer_shows_beyond_index_topk_only(toy, fault):
    """So that the equality above says something about rope, followers and selection."""
    import plain_model

    from vllm_dcp_mla.rehearse.weights import random_weights

    if fault == "follow" and toy["num_hidden_layers"] == 2:
        pytest.skip("no layer follows")
    wrong = {
        "interleaved": not toy.get("indexer_rope_interleave", False),
        "follow": False,
        "select": False,
    }
    tensors = random_weights(toy, seed=1)
    for tokens, low, high in ((16, 0, 1e-9), (60, 1e-3, 9)):
        ids = prompt(tokens, toy["vocab_size"])
        right = plain_model.last_log_probs(toy, tensors, ids)
        changed = plain_model.last_log_probs(toy, tensors, ids, **{fault: wrong[fault]})
        assert low <= (right - changed).abs().max() <= high


def test_settings_of_torch_are_as_before(toy, tmp_path):
    import torch

    from vllm_dcp_mla.rehearse.weights import random_weights

    write(tmp_path, toy, random_weights(toy, seed=1))
    torch.set_float32_matmul_precision("high")
    try:
        last_log_probs(tmp_path, [[1]], [[2]])
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision("highest")


def test_as_a_program(toy, tmp_path):
    from vllm_dcp_mla.rehearse.weights import random_weights

    write(tmp_path, toy, random_weights(toy, seed=1))
    arguments = {"folder": str(tmp_path), "prompts": [[3, 4], [5]], "token_ids": [[1, 2], [0]]}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_dcp_mla.rehearse.hf_reference"],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1].removeprefix(ANSWER))
    expected = last_log_probs(**arguments)
    assert answer == [pytest.approx(row, abs=1e-5) for row in expected]


def test_bundled_models_have_a_reference():
    for model in ("glm-5.2", "deepseek-v3.2"):
        assert invalid_because(small_config(model)) == []


@pytest.mark.parametrize(
    ("model", "change", "says"),
    [
        ("glm-5.2", {"indexer_rope_interleave": False}, "always rotates neighbouring dims"),
        ("deepseek-v3.2", {"indexer_rope_interleave": True}, "always rotates halves"),
        ("deepseek-v3.2", {"index_topk_freq": 2}, "every layer an indexer"),
        ("glm-5.2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("glm-5.2", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
    ],
)
def test_says_where_hf_is_another_function(model, change, says):
    (reason,) = invalid_because(small_config(model) | change)
    assert says in reason


def test_refuses_such_a_config(toy, tmp_path):
    flipped = not toy.get("indexer_rope_interleave", False)
    (tmp_path / "config.json").write_text(json.dumps(toy | {"indexer_rope_interleave": flipped}))
    with pytest.raises(HfReferenceError, match=r"no reference for .* Compare with TP1 only"):
        last_log_probs(tmp_path, [[1]], [[1]])


@pytest.mark.parametrize(
    "lost", ["model.norm.weight", "model.layers.0.self_attn.indexer.wk.weight"]
)
def test_names_a_tensor_that_is_missing(toy, tmp_path, lost):
    from vllm_dcp_mla.rehearse.weights import random_weights

    tensors = random_weights(toy, seed=1)
    del tensors[lost]
    write(tmp_path, toy, tensors)
    with pytest.raises(HfReferenceError, match=lost):
        last_log_probs(tmp_path, [[1]], [[1]])


def test_names_a_tensor_too_many(toy, tmp_path):
    from vllm_dcp_mla.rehearse.weights import random_weights

    tensors = random_weights(toy, seed=1)
    tensors["model.layers.0.self_attn.extra"] = tensors["model.norm.weight"].clone()
    write(tmp_path, toy, tensors)
    with pytest.raises(HfReferenceError, match=r"self_attn\.extra"):
        last_log_probs(tmp_path, [[1]], [[1]])


@pytest.mark.parametrize(
    ("prompts", "token_ids", "says"),
    [
        ([[1], []], [[1], [1]], "prompt 1 has no tokens"),
        ([[1], [2]], [[1]], "2 prompts and 1 lists"),
        ([[1, 128]], [[1]], "token 128; the model has 0 to 127"),
        ([[1]], [[-1]], "token -1; the model has 0 to 127"),
    ],
)
def test_bad_prompts(toy, tmp_path, prompts, token_ids, says):
    (tmp_path / "config.json").write_text(json.dumps(toy))
    with pytest.raises(HfReferenceError, match=says):
        last_log_probs(tmp_path, prompts, token_ids)


@pytest.mark.parametrize("content", [None, "{"])
def test_no_checkpoint(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(HfReferenceError, match="holds no checkpoint"):
        last_log_probs(tmp_path, [[1]], [[1]])


def test_too_little_memory(toy, tmp_path, monkeypatch):
    import torch

    from vllm_dcp_mla.rehearse import hf_reference

    def full(*_):
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(hf_reference, "_load", full)
    (tmp_path / "config.json").write_text(json.dumps(toy))
    with pytest.raises(HfReferenceError, match="3 tokens, about 720 bytes"):
        last_log_probs(tmp_path, [[1], [1, 2, 3]], [[1], [1]])


def test_no_gpu(toy, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(toy))
    with pytest.raises(HfReferenceError, match="torch sees no GPU"):
        last_log_probs(tmp_path, [[1]], [[1]], "cuda")
