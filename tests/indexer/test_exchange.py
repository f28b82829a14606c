import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dcp_mla.indexer.exchange import bound_chunks, exchange_bytes, max_rows
from vllm_dcp_mla.settings import Settings


def test_what_stock_takes_for_one_chunk():
    assert exchange_bytes(16_384, 2048, 8) == 2.25 * 2**30


def test_default_limit():
    limit = Settings().merge_limit_bytes
    assert limit == 256 << 20
    assert max_rows(limit, 2048, 8) == 1820
    assert max_rows(limit, 2048, 2) == 5461


@given(st.integers(1, 1 << 32), st.sampled_from([512, 2048]), st.sampled_from([2, 4, 8]))
def test_rows_fit_and_one_more_does_not(limit, topk, dcp):
    one = exchange_bytes(1, topk, dcp)
    if limit < one:
        with pytest.raises(ValueError, match=f"needs {one} bytes"):
            max_rows(limit, topk, dcp)
        return
    rows = max_rows(limit, topk, dcp)
    assert exchange_bytes(rows, topk, dcp) <= limit < exchange_bytes(rows + 1, topk, dcp)


CHUNKS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(0, 40), st.integers(1, 50)).map(
        lambda t: (slice(t[0], t[0] + t[1]), slice(t[2], t[2] + t[3]))
    ),
    max_size=5,
)


@given(CHUNKS, st.integers(1, 20))
def test_bounded_chunks_cover_the_same_rows_in_the_same_order(chunks, rows):
    def flat(list_of):
        return [(q.start, q.stop, i) for q, s in list_of for i in range(s.start, s.stop)]

    bounded = bound_chunks(chunks, rows)
    assert flat(bounded) == flat(chunks)
    assert all(0 < s.stop - s.start <= rows for _, s in bounded)
