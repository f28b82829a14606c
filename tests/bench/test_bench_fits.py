import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_mla.bench.fits import Line, estimate_step, fit

POSITIVE = st.floats(0.01, 1e4)


@given(POSITIVE, POSITIVE, st.lists(st.integers(1, 10**6), min_size=2, max_size=9, unique=True))
def test_a_line_is_found_again(fixed, per_unit, sizes):
    line = fit([(n, fixed + per_unit * n) for n in sizes])
    for size in sizes:
        assert line.at(size) == pytest.approx(fixed + per_unit * size, rel=1e-4)
    assert line.worst < 1e-4


def test_errors_count_by_what_they_are_of_a_point():
    """An absolute fit would give up the short launch for the long one."""
    line = fit([(1, 10.0), (1000, 1000.0), (1001, 1300.0)])
    assert line.at(1) == pytest.approx(10, rel=0.02)
    assert line.worst == pytest.approx(0.15, abs=0.04)


def test_no_fixed_cost_is_negative():
    line = fit([(10, 1.0), (20, 4.0)])
    assert line.fixed_us == 0
    assert 0.1 < line.per_unit_us < 0.2
    assert line.worst == pytest.approx(max(abs(line.at(10) - 1), abs(line.at(20) - 4) / 4))


@pytest.mark.parametrize("points", [[], [(1, 1.0)], [(2, 1.0), (2, 3.0)], [(1, 1.0), (2, 0.0)]])
def test_what_no_line_goes_through_is_refused(points):
    with pytest.raises(ValueError, match="two different sizes"):
        fit(points)


def test_a_step_on_paper():
    line = Line(fixed_us=5, per_unit_us=0.001, worst=0)
    size = {"tokens": 16, "heads": 64, "topk": 2048, "layers": 78, "link_bytes_per_us": 450_000}
    one, eight = (estimate_step(line, dcp=dcp, **size) for dcp in (1, 8))
    assert one.attention_us == pytest.approx(78 * (5 + 16 * 2048 * 0.001))
    assert one.exchange_us == 0
    assert eight.attention_us == pytest.approx(78 * (5 + 16 * 256 * 0.001))
    assert eight.exchange_us == pytest.approx(78 * 16 * 64 * (576 + 512 + 2) * 2 * 7 / 8 / 450_000)
