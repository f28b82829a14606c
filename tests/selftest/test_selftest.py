import contextlib
import json

import pytest

torch = pytest.importorskip("torch")
from release_marks import RELEASE, gathers_here, serves_hopper  # noqa: E402
from vllm_dcp_mla.cli.main import main  # noqa: E402
from vllm_dcp_mla.compat.releases import RELEASES  # noqa: E402
from vllm_dcp_mla.selftest import world  # noqa: E402
from vllm_dcp_mla.selftest.attention import StepResult  # noqa: E402
from vllm_dcp_mla.selftest.batch import (  # noqa: E402
    Shape,
    chosen_keys,
    expected_output,
    make_batch,
    shard_cache,
)
from vllm_dcp_mla.selftest.faults import (  # noqa: E402
    FAULTS,
    PCP_FAULTS,
    SPANNING_FAULTS,
)
from vllm_dcp_mla.selftest.observe import Builds  # noqa: E402
from vllm_dcp_mla.selftest.run import ERROR_LIMIT, _judge  # noqa: E402
from vllm_dcp_mla.topology import local_seq_lens  # noqa: E402

SHAPE = Shape("s", (5, 1, 200), (1, 1, 3), 3, 4, interleave=4)


def test_shards_hold_every_key_once_and_nothing_else():
    batch = make_batch(SHAPE, seed=1)
    held = {request: [] for request in range(3)}
    for rank in range(4):
        cache, table = shard_cache(SHAPE, batch, rank, 4, seed=1)
        written = 0
        for request, length in enumerate(SHAPE.seq_lens):
            local = local_seq_lens(length, 4, SHAPE.interleave)[rank]
            for index in range(local):
                block = table[request, index // SHAPE.block_size]
                held[request].append(cache[block, index % SHAPE.block_size])
            written += local
        assert int((~cache.isnan().any(dim=-1)).sum()) == written
    for request, rows in held.items():
        got = {tuple(row.tolist()) for row in rows}
        assert got == {tuple(row.tolist()) for row in batch.keys[request]}
        assert len(rows) == SHAPE.seq_lens[request]


def test_chosen_keys_are_the_best_visible_ones():
    batch = make_batch(SHAPE, seed=2)
    chosen = chosen_keys(SHAPE, batch)
    token = 0
    for request, (length, queries) in enumerate(zip(SHAPE.seq_lens, SHAPE.query_lens, strict=True)):
        for position in range(length - queries, length):
            scores = batch.scores[request][: position + 1].tolist()
            best = sorted(range(position + 1), key=lambda i: -scores[i])[: SHAPE.topk]
            assert sorted(chosen[token].tolist()) == sorted(best)
            assert batch.token_request[token] == request
            token += 1
    assert token == len(chosen)


def test_expected_output_of_one_key_is_its_latent():
    shape = Shape("one", (1,), (1,), 1, 2)
    batch = make_batch(shape, seed=3)
    out = expected_output(shape, batch, scale=0.1)
    torch.testing.assert_close(out[0, 0], batch.keys[0][0, :512].double())


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--ranks", "two"], 2, "--ranks is 'two'"),
        (["--interleave", "3"], 2, "--interleave is 3"),
        (["--break", "everything"], 2, "--break is 'everything'"),
        (["--gpu", "a100"], 2, "--gpu is 'a100'"),
        (["--device", "tpu"], 2, "--device is 'tpu'"),
        (["--pcp", "two"], 2, "--pcp is 'two'"),
        (["--pcp", "4", "--dcp", "2"], 1, "--decode-context-parallel-size is 2"),
        (["--tp", "8", "--pcp", "4", "--dcp", "4"], 1, "--tp 8 and --pcp 4 are 32 ranks"),
        (["--break", "lost-range"], 1, "lost-range, which shows with PCP only"),
        (["--pcp", "2", "--break", "group-order"], 1, "needs --tp 2 --pcp 2 --dcp 4"),
        (["--tp", "8", "--dcp", "3"], 1, "--decode-context-parallel-size is 3"),
        (["--ranks", "2", "--tp", "4"], 1, "--ranks and --tp are given together"),
        (["--ranks", "4", "--dcp", "2"], 1, "--ranks and --dcp are given together"),
        (["--ranks", "0"], 1, "is 0"),
        (["--ranks", "1"], 1, "--dcp is 1"),
        (["--ranks", "1000"], 1, "at most 16 ranks"),
        (["--ranks", "9" * 20], 1, "at most 16 ranks"),
    ],
)
@pytest.mark.vllm
def test_bad_input(capsys, arguments, status, named):
    assert main(["selftest", *arguments]) == status
    assert named in capsys.readouterr().err
    assert main(["selftest", *arguments, "--json"]) == status
    answer = json.loads(capsys.readouterr().out)
    assert not answer["ok"]
    assert named in " ".join(answer["problems"])


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_DCP_MLA_PCP_CACHED_ROWS", "maybe"),
        ("VLLM_DCP_MLA_KERNEL", "fastest"),
        ("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "-1"),
    ],
)
def test_a_setting_that_cannot_be_is_said_before_ranks_start(capsys, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert main(["selftest"]) == 2
    assert f"{variable} is {value!r}" in capsys.readouterr().err


@pytest.mark.vllm
def test_an_interleave_that_a_release_refuses_is_said(capsys, monkeypatch):
    monkeypatch.setattr("vllm_dcp_mla.cli.selftest.installed_release", lambda: RELEASES[0])
    assert main(["selftest", "--interleave", "64"]) == 1
    assert "--interleave is 64, but the indexer of vLLM 0.29 takes 1" in capsys.readouterr().err


@pytest.mark.vllm
def test_what_a_release_leaves_to_stock_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("vllm_dcp_mla.cli.selftest.installed_release", lambda: RELEASES[-2])
    assert main(["selftest", "--gpu", "h200"]) == 1
    assert "FLASH_ATTN_MLA_SPARSE is stock's with vLLM 0.32" in capsys.readouterr().err
    assert main(["selftest", "--pcp", "2"]) == 1
    assert "PCP with DCP is not served with vLLM 0.32" in capsys.readouterr().err


def run(*arguments):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "vllm_dcp_mla.cli.main", "selftest", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=800,
    )
    return done.returncode, json.loads(done.stdout)


def answer_of(rank, num_ranks, folder, arguments):
    # A file, since vLLM asks for the descriptor of standard output.
    with (folder / "said").open("w+") as said:
        with contextlib.redirect_stdout(said):
            status = main(["selftest", "--json", *arguments])
        said.seek(0)
        return status, json.load(said)


def run_forked(*arguments):
    """As `run`, but vLLM is imported already."""
    return world.run_ranks(1, answer_of, arguments, timeout_s=400)[0]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("cpu_vllm")
@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        (("--ranks", "2"), run),
        (("--tp", "4", "--dcp", "2"), run_forked),
        pytest.param(("--tp", "4", "--dcp", "2", "--gpu", "h200"), run_forked, marks=serves_hopper),
    ],
)
def test_every_case_agrees(arguments, how):
    status, answer = how(*arguments)
    assert status == 0, answer
    assert answer["ok"]
    # Two exchanges, and both interleaves where the indexer takes them.
    assert len(answer["cases"]) == 7 * (3 if RELEASE.interleaves else 2)
    for case in answer["cases"]:
        assert case["ok"]
        assert 0 < case["error"] <= case["limit"]
        assert len(set(case["collectives"])) == 1
        assert case["collectives"][0] in (3, 4)
        assert case["syncs"] is None
        assert case["late_compiles"] is None


@pytest.mark.vllm
@pytest.mark.slow
@gathers_here
@pytest.mark.usefixtures("cpu_vllm")
@pytest.mark.parametrize(
    ("sizes", "more", "how"),
    [
        ((1, 2, 2), (), run),
        ((1, 2, 2), ("--interleave", "64", "--gpu", "h200"), run_forked),
        ((1, 4, 4), ("--interleave", "1"), run_forked),
        ((2, 2, 4), ("--interleave", "64"), run_forked),
    ],
)
def test_every_case_with_pcp_agrees(sizes, more, how):
    tp, pcp, dcp = map(str, sizes)
    status, answer = how("--tp", tp, "--pcp", pcp, "--dcp", dcp, *more)
    assert status == 0, answer
    assert len(answer["cases"]) == 8 * (2 if more else 3)
    interleave = int(more[1]) if more else 1
    ranges, whole = {}, {}
    for case in answer["cases"]:
        assert case["ok"]
        assert 0 < case["error"] <= case["limit"]
        assert len(set(case["collectives"])) == 1
        name, _, kind = case["name"].rstrip(")").partition(f" (ag_rs, interleave {interleave}, ")
        {"in ranges": ranges, "whole": whole}.get(kind, {})[name] = case["collectives"][0]
    assert ranges.keys() == whole.keys()
    assert len(whole) == 8
    # A context of 1,999 keys comes 128 at a time, or a turn of every rank.
    pieces = -(-1999 // max(128, sizes[2] * interleave))
    assert ranges["long context"] - whole["long context"] == pieces - 1
    assert ranges["decode"] == whole["decode"]


@pytest.mark.vllm
def test_a_gpu_that_is_not_here_is_missed():
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    status, answer = run("--device", "cuda")
    assert status == 1
    assert "--device is cuda, but torch sees no GPU" in answer["problems"][0]
    assert answer["cases"] == []


def result(error=0.001, collectives=("all_gather", "reduce_scatter"), syncs=None, compiles=None):
    return StepResult(error, collectives, Builds(syncs, compiles), seconds=0.1)


@pytest.mark.parametrize(
    ("other", "ok"),
    [
        (result(), True),
        (result(error=ERROR_LIMIT * 1.01), False),
        (result(error=float("inf")), False),
        (result(collectives=("all_gather",)), False),
        (result(collectives=("reduce_scatter", "all_gather")), False),
        (result(syncs=0, compiles=0), True),
        (result(syncs=1, compiles=0), False),
        (result(syncs=0, compiles=1), False),
    ],
)
def test_one_rank_is_enough_to_fail_a_case(other, ok):
    assert _judge("a case", [result(), other]).ok is ok
    assert _judge("a case", [other, result()]).ok is ok


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.usefixtures("cpu_vllm")
@pytest.mark.parametrize(
    ("fault", "gpu"),
    [
        pytest.param(
            *(fault, gpu),
            marks=[gathers_here] * (fault in PCP_FAULTS) + [serves_hopper] * (gpu == "h200"),
        )
        for fault in FAULTS
        # Two of them are planted where no backend is.
        for gpu in (("b200",) if fault in ("local-length", "group-order") else ("b200", "h200"))
    ],
)
def test_a_planted_fault_is_found(fault, gpu):
    ranks = ("--ranks", "2")
    if fault in PCP_FAULTS:
        ranks = ("--pcp", "2")
    if fault in SPANNING_FAULTS:
        ranks = ("--tp", "2", "--pcp", "2", "--dcp", "4")
    flags = (*ranks, "--interleave", "1", "--gpu", gpu)
    status, answer = run_forked(*flags, "--break", fault)
    assert status == 1
    assert not answer["ok"]
    if fault == "prefill-lse":  # ranks with different numbers of prefill rows exchange them
        assert "died with exit status" in answer["problems"][0]
        return
    # Found by comparing, not because something else went wrong.
    assert not answer.get("problems"), answer
    assert [case for case in answer["cases"] if not case["ok"]]
