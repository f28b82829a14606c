"""How far log-probabilities moved from TP1's, as a multiple of what rounding alone does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Largest accepted multiple of the rounding noise, of TP2 against TP1.
DRIFT_LIMIT = 1.5
_RESAMPLES = 10_000
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Drift:
    """The drift of one class of prompts.

    Attributes:
        prompts: how many.
        mean: mean ``|log-probability - TP1's|`` over prompts, in nats.
        noise: the same of the engine that shows the rounding noise.
        ratio: ``mean / noise``.
        low, high: 95 % bootstrap interval of the ratio.
    """

    prompts: int
    mean: float
    noise: float
    ratio: float
    low: float
    high: float

    @property
    def ok(self) -> bool:
        """Whether the whole interval is below :data:`DRIFT_LIMIT`."""
        return self.high <= DRIFT_LIMIT


def distance(scores: np.ndarray, reference: np.ndarray) -> float:
    """Mean absolute difference of a prompt's log-probabilities ``[positions, tokens]``.

    Raises:
        ValueError: the shapes differ, or a value is no number.
    """
    if scores.shape != reference.shape:
        raise ValueError(f"{scores.shape} log-probabilities against {reference.shape}")
    if not (np.isfinite(scores).all() and np.isfinite(reference).all()):
        raise ValueError("a log-probability is not finite")
    return float(np.abs(scores - reference).mean())


def compare(distances: np.ndarray, noise: np.ndarray, seed: int = 0) -> Drift:
    """The ratio of two means over the same prompts, with its percentile bootstrap interval.

    Prompts are resampled in pairs (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    chapter 13): a long prompt moves both means.

    Args:
        distances: ``[N]``, one a prompt.
        noise: ``[N]``, the rounding noise of the same prompts.
        seed: of the resampling.

    Raises:
        ValueError: the shapes differ, are empty, or a value is no number.
    """
    if distances.shape != noise.shape or distances.ndim != 1 or not distances.size:
        raise ValueError(f"distances {distances.shape} against noise {noise.shape}")
    if not (np.isfinite(distances).all() and np.isfinite(noise).all()):
        raise ValueError("a distance is not finite")
    drawn = np.random.default_rng(seed).integers(distances.size, size=(_RESAMPLES, distances.size))
    means, noises = distances[drawn].mean(axis=1), noise[drawn].mean(axis=1)
    tail = (1 - _CONFIDENCE) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        # No noise and no distance is no drift; a distance without noise is without bound.
        ratios = np.where(means == 0, 0.0, means / noises)
        ratio = 0.0 if distances.mean() == 0 else float(distances.mean() / noise.mean())
    # Not interpolated: between two infinities there is no number.
    low, high = np.quantile(ratios, [tail, 1 - tail], method="inverted_cdf")
    return Drift(
        distances.size, float(distances.mean()), float(noise.mean()), ratio, float(low), float(high)
    )
