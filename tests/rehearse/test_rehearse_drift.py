import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dcp_mla.rehearse.drift import DRIFT_LIMIT, compare, distance


@pytest.fixture(autouse=True)
def warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def draws(seed, size=32):
    return np.random.default_rng(seed).gamma(16.0, 0.01, size)


def test_distance_is_the_mean_gap():
    reference = np.zeros((2, 3))
    assert distance(np.array([[1.0, -1, 0], [0, 0, 4]]), reference) == 1.0


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (6,), (1, 3)])
def test_another_shape_is_an_error(shape):
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        distance(np.zeros(shape), np.zeros((2, 3)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_a_value_that_is_no_number_is_an_error(value, which):
    scores = [np.zeros((2, 3)), np.zeros((2, 3))]
    scores[which][1, 2] = value
    with pytest.raises(ValueError, match="not finite"):
        distance(*scores)


def test_infinity_against_infinity_is_an_error():
    with pytest.raises(ValueError, match="not finite"):
        distance(np.full((1, 1), -np.inf), np.full((1, 1), -np.inf))


@settings(max_examples=10)
@given(st.floats(0.01, 100), st.integers(0, 100))
def test_a_known_ratio_is_found_exactly(ratio, seed):
    noise = draws(seed)
    found = compare(ratio * noise, noise)
    assert found.ratio == pytest.approx(ratio)
    assert found.low == pytest.approx(ratio)
    assert found.high == pytest.approx(ratio)
    assert found.prompts == 32
    assert found.ok == (found.high <= DRIFT_LIMIT)


@settings(max_examples=10)
@given(st.integers(0, 200))
def test_equal_noise_is_accepted_and_twice_is_not(seed):
    """Independent draws of the same distribution, and of one with twice the mean."""
    noise, other = draws(seed), draws(seed + 10_000)
    equal, planted = compare(other, noise), compare(2 * other, noise)
    assert equal.ok
    assert not planted.ok
    assert equal.low < equal.ratio < equal.high
    assert planted.ratio == pytest.approx(2 * equal.ratio)


def test_the_whole_interval_must_be_below_the_limit():
    noise = draws(1)
    wide = noise * np.where(np.arange(32) % 2, 0.1, 2.7)
    found = compare(wide, noise)
    assert found.ratio < DRIFT_LIMIT < found.high
    assert not found.ok


def test_the_interval_covers_the_true_ratio():
    """About 95 times of 100, over 100 pairs of draws with a true ratio of 1."""
    inside = 0
    for seed in range(100):
        found = compare(draws(2 * seed), draws(2 * seed + 1))
        inside += found.low <= 1 <= found.high
    assert 86 <= inside <= 100


def test_no_noise_and_no_distance_is_no_drift():
    found = compare(np.zeros(4), np.zeros(4))
    assert (found.ratio, found.low, found.high, found.ok) == (0, 0, 0, True)


@pytest.mark.parametrize("prompts", [1, 2, 32])
def test_a_distance_without_noise_is_without_bound(prompts):
    found = compare(np.full(prompts, 1e-9), np.zeros(prompts))
    assert (found.ratio, found.low, found.high) == (np.inf, np.inf, np.inf)
    assert not found.ok


def test_noise_of_one_prompt_alone_bounds_nothing():
    found = compare(np.full(4, 0.1), np.array([0.1, 0, 0, 0]))
    assert found.high == np.inf
    assert np.isfinite(found.low)
    assert not found.ok


@pytest.mark.parametrize(
    ("distances", "noise"),
    [(np.zeros(0), np.zeros(0)), (np.zeros(3), np.zeros(4)), (np.zeros((2, 2)), np.zeros((2, 2)))],
)
def test_what_cannot_be_paired_is_an_error(distances, noise):
    with pytest.raises(ValueError, match="against noise"):
        compare(distances, noise)


def test_a_distance_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="not finite"):
        compare(np.array([0.1, np.nan]), np.array([0.1, 0.1]))


def test_the_same_seed_resamples_the_same():
    noise, other = draws(3), draws(4)
    assert compare(other, noise) == compare(other, noise)
    assert compare(other, noise, seed=1) != compare(other, noise)
