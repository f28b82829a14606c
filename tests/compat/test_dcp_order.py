"""The DCP group's order, as vLLM makes it over gloo with and without the patch."""

import pytest

torch = pytest.importorskip("torch")

from release_marks import gathers_here  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("cpu_vllm"), gathers_here]


def places(rank, num_ranks, folder, sizes, patched):
    """Of each group: this rank's number, its place in what is gathered, the group's ranks."""
    from unittest import mock

    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    from vllm_dcp_mla.models import load_config
    from vllm_dcp_mla.selftest import world

    config = world.engine_config(
        load_config("glm-5.2"), sizes.tp, sizes.dcp, "ag_rs", pcp=sizes.pcp
    )
    make = parallel_state.init_model_parallel_group
    with (
        set_current_vllm_config(config),
        mock.patch.object(
            parallel_state, "init_model_parallel_group", make if patched else make.__wrapped__
        ),
    ):
        world.join(rank, sizes, folder)
        seen = {}
        for name in ("dcp", "pcp", "tp"):
            group = getattr(parallel_state, f"get_{name}_group")()
            gathered = group.all_gather(torch.tensor([rank]), dim=0).tolist()
            seen[name] = (group.rank_in_group, gathered.index(rank), group.ranks)
        world.leave()
    return seen


def ask(tp, pcp, dcp, patched):
    from vllm_dcp_mla.selftest import world

    sizes = world.Sizes(tp, pcp, dcp)
    return world.run_ranks(sizes.num_ranks, places, sizes, patched)


def test_stock_numbers_shards_otherwise_than_it_gathers_them():
    """The symptom; once it is gone, so can the patch."""
    answers = ask(2, 2, 4, patched=False)
    assert [a["dcp"][:2] for a in answers] == [(0, 0), (2, 1), (1, 2), (3, 3)]


@pytest.mark.parametrize("sizes", [(2, 2, 4), (2, 2, 2), (1, 4, 4), (4, 1, 2)])
def test_numbers_are_places(sizes):
    patched = ask(*sizes, patched=True)
    for answer in patched:
        for name, (number, place, _) in answer.items():
            assert number == place, name
    if sizes != (2, 2, 4):
        assert patched == ask(*sizes, patched=False)


def test_installing_again_changes_nothing():
    from vllm.distributed import parallel_state

    from vllm_dcp_mla.compat import dcp_order

    before = parallel_state.init_model_parallel_group
    dcp_order.install()
    assert parallel_state.init_model_parallel_group is before
    assert not hasattr(before.__wrapped__, "__wrapped__")


def test_other_groups_keep_their_order(monkeypatch):
    from vllm.distributed import parallel_state

    from vllm_dcp_mla.compat import dcp_order

    asked = []

    def stock(group_ranks, local_rank, backend, group_name=None):
        asked.append((group_ranks, group_name))

    monkeypatch.setattr(parallel_state, "init_model_parallel_group", stock)
    dcp_order.install()
    for name in ("dcp", "pcp", None):
        parallel_state.init_model_parallel_group([[2, 1], [3, 0]], 0, "gloo", group_name=name)
    assert asked == [
        ([[1, 2], [0, 3]], "dcp"),
        ([[2, 1], [3, 0]], "pcp"),
        ([[2, 1], [3, 0]], None),
    ]
