import pytest

from vllm_dcp_mla.bench.floor import Ceilings, Demand, attention

H200 = Ceilings(bytes_per_us=4.3e6, flops_per_us=7.9e8)


@pytest.mark.parametrize(
    ("tokens", "rows", "us"), [(1, 2048, 0.55), (64, 2048, 35.1), (64, 512, 8.8), (4096, 512, 562)]
)
def test_rows_alone_take_what_was_measured_on_an_h200(tokens, rows, us):
    """The design's figures count rows only; queries, indices and results come on top."""
    rows_only = Demand(tokens * rows * 1152, 0)
    assert H200.floor_us(rows_only) == pytest.approx(us, rel=0.02)
    assert 1 < attention(tokens, 64, rows).bytes / rows_only.bytes < 1.3


def test_operations_and_bytes_of_a_launch():
    demand = attention(2, 128, 512, element_bytes=1)
    assert demand.flops == 2 * 2 * 128 * 512 * (576 + 512)
    assert demand.bytes == 2 * 512 * (576 + 4) + 2 * 128 * (576 + 512) * 2 + 2 * 128 * 4
    assert attention(2, 128, 512, row_bytes=656).bytes == demand.bytes + 2 * 512 * 80


def test_the_larger_term_is_the_floor():
    assert H200.bound_by(attention(4096, 64, 512)) == "bytes"
    assert H200.bound_by(attention(4096, 128, 2048, element_bytes=1)) == "flops"
    demand = attention(4096, 128, 2048, element_bytes=1)
    assert H200.floor_us(demand) == pytest.approx(demand.flops / 7.9e8)
