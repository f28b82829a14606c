from unittest import mock

from vllm_dcp_mla import kernel_choice
from vllm_dcp_mla.bench.preferences import suggested, where_behind
from vllm_dcp_mla.bench.rows import Row
from vllm_dcp_mla.kernel_choice import FEW_HEADS, Preference
from vllm_dcp_mla.key_splits import ANY


def measured(tokens, times, rows=512, heads=64, cache="bf16"):
    sizes = {"tokens": tokens, "rows": rows, "heads": heads, "cache": cache}
    shape = ", ".join(map(str, sizes.values()))
    return [Row("attention", shape, name, us=us, sizes=sizes) for name, us in times.items()]


OURS, FIRST, SECOND = "triton_decode", "flashmla", "flash_attn3"
TABLE = (
    Preference(ANY, 512, 8, OURS),
    Preference(ANY, 512, ANY, FIRST),
    Preference(ANY, ANY, ANY, OURS),
)


@mock.patch.object(kernel_choice, "PREFERENCES", TABLE)
def test_where_the_dispatch_is_behind_is_said():
    rows = [
        *measured(8, {OURS: 10, FIRST: 9.8}),
        *measured(4, {OURS: 12, FIRST: 9, SECOND: 8}),
        *measured(9, {OURS: 9, FIRST: 10, SECOND: 11}),
        *measured(9, {OURS: 12}, cache="fp8_e4m3"),
        *measured(9, {OURS: None, FIRST: 3}),
    ]
    assert where_behind(rows[:-2]) == [
        "4, 512, 64, bf16: dispatched to triton_decode, 50% behind flash_attn3.",
        "9, 512, 64, bf16: dispatched to flashmla, 11% behind triton_decode.",
    ]
    assert where_behind(measured(9, {OURS: None, FIRST: 3})) == []
    assert where_behind(measured(9, {SECOND: 3})) == []


def test_the_table_that_was_measured():
    rows = [
        *measured(1, {OURS: 10, FIRST: 20, SECOND: 19}),
        *measured(16, {OURS: 20.3, FIRST: 21, SECOND: 20}),
        *measured(32, {OURS: 30, FIRST: 22, SECOND: 27}),
        *measured(16, {OURS: 31, FIRST: 22, SECOND: 27}, heads=128),
        *measured(1, {OURS: 10, FIRST: 60, SECOND: 20}, rows=2048),
        *measured(16, {OURS: 50, FIRST: 60, SECOND: 40}, rows=2048),
        *measured(64, {OURS: None, FIRST: 60, SECOND: 80}, rows=2048),
        *measured(64, {OURS: 5}, rows=2048, cache="fp8_e4m3"),
        *measured(1, {OURS: 9, FIRST: 12, SECOND: 13}, rows=1024, heads=16),
        *measured(9, {OURS: 30, FIRST: 60, SECOND: 20}, rows=1024, heads=32),
    ]
    lines = suggested(rows)
    table = tuple(eval(line.removesuffix(",")) for line in lines)
    assert table == (
        Preference(FEW_HEADS, ANY, 1, OURS),
        Preference(FEW_HEADS, ANY, ANY, SECOND),
        Preference(ANY, 512, 16, OURS),
        Preference(ANY, 512, ANY, FIRST),
        Preference(ANY, ANY, 1, OURS),
        Preference(ANY, ANY, 16, SECOND),
        Preference(ANY, ANY, ANY, FIRST),
    )
    with mock.patch.object(kernel_choice, "PREFERENCES", table):
        assert where_behind(rows) == []


def test_head_counts_that_disagree_still_have_a_line():
    rows = [
        *measured(2, {OURS: 10, FIRST: 11}),
        *measured(1, {OURS: 13, FIRST: 10}, heads=128),
    ]
    assert suggested(rows) == ["Preference(ANY, ANY, ANY, 'flashmla'),"]
