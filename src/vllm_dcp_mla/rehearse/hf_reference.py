"""Transformers' model in float32: log-probabilities that owe nothing to vLLM.

What it shares with vLLM's ``models/deepseek_v32``, and what not:

* The same function: rope (in the indexer of neighbouring dims for GLM, of halves for
  DeepSeek-V3.2), YaRN's softmax scale, index scores ``sum_h w_h relu(q_h k)``, the best
  ``index_topk`` keys, followers that take their leader's keys, sigmoid routing with a correction
  bias. :func:`invalid_because` checks the flags by which a config can leave it. Neither has a
  Hadamard rotation of the indexer's queries and keys, which changes no score.
* Precision: vLLM computes in bf16, and rounds the indexer's queries and keys to fp8. Up to
  ``index_topk`` tokens every key is selected, and bf16 is all that is left. Beyond, keys near the
  threshold are swapped; see :data:`BF16_ERROR` for what both cost. Keys that no index head looks
  for (4 to 7% under the weights of this package) score exactly 0, so that their order is anyone's.
* The cache: HF's is not quantised. With an fp8 cache, TP1 of the same cache dtype is the reference.
* Norms of query and key latents have an epsilon of 1e-6 in HF, whatever ``rms_norm_eps`` says.
  For latents of unit size, as here, 1e-5 in its place changes them by 5e-6.
* HF has no MTP layer: this is a reference of the target model.

As a program it reads a JSON object with the arguments of :func:`last_log_probs` and prints the
answer, so that the GPU's memory is free again when it ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .checkpoint import CONFIG
from .config import count

#: Before the answer, when run as a program.
ANSWER = "vllm-dcp-mla HF reference: "

#: Mean absolute difference of the 20 largest log-probabilities between HF's model in bf16, with the
#: indexer's queries and keys rounded to fp8, and in float32: 0.018 to 0.025 for checkpoints of
#: this package with index_topk 512 and prompts of 100 to 1,200 tokens, on both sides of index_topk.
#: At 2,000 tokens GLM-5.2's bf16 alone gives 0.020, and so does the rounding to fp8 alone.
BF16_ERROR = 0.025


class HfReferenceError(RuntimeError):
    """Transformers cannot give a reference; the message says why."""


def invalid_because(config: dict[str, Any]) -> list[str]:
    """Why HF's model is another function than vLLM's under this config; empty when it is the same.

    Args:
        config: a ``config.json`` of one of :data:`.config.ARCHITECTURES`.
    """
    name, reasons = config["architectures"][0], []
    glm = name == "GlmMoeDsaForCausalLM"
    if bool(config.get("indexer_rope_interleave", False)) != glm:
        pairs = "neighbouring dims" if glm else "halves"
        reasons.append(
            f"indexer_rope_interleave is {not glm}; HF's {name} always rotates {pairs} there"
        )
    if not glm and (count(config, "index_topk_freq") > 1 or config.get("index_topk_pattern")):
        reasons.append(f"layers share keys; HF's {name} gives every layer an indexer")
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key) != only:
            reasons.append(f"{key} is {config.get(key)!r}; HF's {name} knows {only!r} only")
    return reasons


def last_log_probs(
    folder: str | Path,
    prompts: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    device: str = "cpu",
) -> list[list[float]]:
    """Log-probabilities of the token behind each prompt, in float32.

    Prompts run one after the other. One of n tokens needs about ``20 * heads * n**2`` bytes beside
    the weights: scores, mask and softmax are whole matrices.

    Args:
        folder: a checkpoint of :func:`.checkpoint.write_checkpoint`.
        prompts: token ids of each prompt, at least one.
        token_ids: for each prompt the token ids that are asked for.
        device: torch's name for it.

    Returns:
        For each prompt the log-probabilities of its ``token_ids``, in their order.

    Raises:
        HfReferenceError: no checkpoint, no Transformers with this model, a config under which it
            is another function than vLLM's, tensors that do not fit it, a prompt without tokens or
            with a token beyond the vocabulary, no such device, or too little of its memory.
    """
    folder = Path(folder)
    config = _read_config(folder)
    _check(config, prompts, token_ids)
    with _exact(device):
        import torch

        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise HfReferenceError(f"device is {device!r}, but torch sees no GPU; use 'cpu'.")
        try:
            model = _load(folder, config, device)
            return [
                _ask(model, prompt, wanted)
                for prompt, wanted in zip(prompts, token_ids, strict=True)
            ]
        except torch.OutOfMemoryError as error:
            longest = max(map(len, prompts))
            need = 20 * config["num_attention_heads"] * longest**2
            raise HfReferenceError(
                f"{device} has too little memory for the reference of {longest} tokens, about "
                f"{need:,} bytes beside the weights: {error}; free some, or give shorter prompts."
            ) from None


def _check(
    config: dict[str, Any], prompts: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]]
) -> None:
    if len(prompts) != len(token_ids):
        raise HfReferenceError(
            f"got {len(prompts)} prompts and {len(token_ids)} lists of token ids; give one each."
        )
    vocabulary = range(config["vocab_size"])
    for number, (prompt, wanted) in enumerate(zip(prompts, token_ids, strict=True)):
        if not prompt:
            raise HfReferenceError(f"prompt {number} has no tokens; a prompt has at least one.")
        if strange := [token for token in (*prompt, *wanted) if token not in vocabulary]:
            raise HfReferenceError(
                f"prompt {number} has or asks for token {strange[0]}; the model has 0 to "
                f"{vocabulary[-1]}."
            )


def _ask(model: Any, prompt: Sequence[int], wanted: Sequence[int]) -> list[float]:
    import torch

    with torch.inference_mode():
        ids = torch.tensor([list(prompt)], device=model.device)
        logits = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
        return logits.log_softmax(-1)[list(wanted)].tolist()


@contextmanager
def _exact(device: str) -> Iterator[None]:
    """No TF32, and deterministic kernels where there are such."""
    if device != "cpu":  # cuBLAS reads it when its first handle is made
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise HfReferenceError(
            f"{folder} holds no checkpoint of this package: {error}; write one there first."
        ) from None
    if reasons := invalid_because(config):
        raise HfReferenceError(
            f"HF is no reference for {folder}: {'; '.join(reasons)}. Compare with TP1 only."
        )
    return config


def _load(folder: Path, config: dict[str, Any], device: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise HfReferenceError(
            f"Transformers does not import: {error}; vLLM needs it too: install vLLM again."
        ) from None
    import torch

    name, layers = config["architectures"][0], config["num_hidden_layers"]
    if not hasattr(transformers, name):
        raise HfReferenceError(
            f"Transformers {transformers.__version__} has no {name}; compare with TP1 only."
        )
    with _quiet(transformers):
        model, report = getattr(transformers, name).from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    mtp = f"model.layers.{layers}."
    strange = [key for key in report["unexpected_keys"] if not key.startswith(mtp)]
    missing, misfits = sorted(report["missing_keys"]), sorted(map(str, report["mismatched_keys"]))
    if strange or missing or misfits or report["error_msgs"]:
        raise HfReferenceError(
            f"{folder} does not fit HF's {name}: missing {missing}, unexpected {sorted(strange)}, "
            f"of another shape {misfits}; write the checkpoint again."
        )
    return model.to(device).eval()


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No list of the MTP layer's tensors, and no progress bar."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


if __name__ == "__main__":
    try:
        print(ANSWER + json.dumps(last_log_probs(**json.load(sys.stdin))), flush=True)
    except HfReferenceError as error:
        sys.exit(str(error))
