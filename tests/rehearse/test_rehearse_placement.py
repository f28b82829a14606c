import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dcp_mla.rehearse.placement import Placement, visible


@settings(max_examples=60)
@given(st.data())
def test_capacity_is_never_exceeded_and_comes_back(data):
    gpus, most = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    capacity, packed = data.draw(st.integers(most, 16)), data.draw(st.booleans())
    placement, held, load = Placement(gpus, most if packed else None, capacity), [], [0] * gpus
    for _ in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            chosen, ranks = held.pop(data.draw(st.integers(0, len(held) - 1)))
            placement.give_back(chosen, ranks)
            for rank in range(ranks):
                load[chosen[rank // placement.share(ranks)]] -= 1
        else:
            ranks = data.draw(st.integers(1, gpus * most))
            share = placement.share(ranks)
            chosen = placement.take(ranks)
            if chosen is None:
                assert held, "an engine that fits an empty machine gets room there"
                continue
            assert len(set(chosen)) == len(chosen) == -(-ranks // share)
            assert list(chosen) == sorted(chosen)
            held.append((chosen, ranks))
            for rank in range(ranks):
                load[chosen[rank // share]] += 1
        assert max(load) <= capacity
    for chosen, ranks in held:
        placement.give_back(chosen, ranks)
    assert placement.take(gpus * most) == tuple(range(gpus))


def test_an_engine_goes_where_least_runs():
    placement = Placement(3, 2, 4)
    assert placement.take(2) == (0,)
    assert placement.take(1) == (1,)
    assert placement.take(2) == (2,)
    assert placement.take(2) == (1,)


def test_ranks_get_a_gpu_each_where_they_can():
    placement = Placement(2, None, 4)
    assert (placement.share(4), placement.take(4)) == (2, (0, 1))
    assert (placement.share(2), placement.take(2)) == (1, (0, 1))
    assert placement.take(1) == (0,)
    assert placement.take(2) is None
    placement.give_back((0, 1), 2)
    assert placement.take(2) == (0, 1)


def test_no_room_takes_nothing():
    placement = Placement(1, 2, 2)
    assert placement.take(1) == (0,)
    assert placement.take(2) is None
    assert placement.take(1) == (0,)
    assert placement.take(1) is None


def test_more_ranks_than_gpus_have_no_room():
    assert Placement(2, 1, 1).take(3) is None


@pytest.mark.parametrize(
    ("theirs", "chosen", "shown"),
    [
        (None, (0, 2), "0,2"),
        ("3,5,7", (0, 2), "3,7"),
        ("7,3", (0,), "7"),
        ("GPU-8932f937-d72c,GPU-aa11", (1,), "GPU-aa11"),
        ("MIG-c6d4f1ef,MIG-2", (0, 1), "MIG-c6d4f1ef,MIG-2"),
        ("0, 1", (1,), "1"),
        ("", (0,), ""),
    ],
)
def test_an_engine_sees_its_gpus_in_the_callers_terms(theirs, chosen, shown):
    environ = {} if theirs is None else {"CUDA_VISIBLE_DEVICES": theirs}
    assert visible(chosen, environ) == {"CUDA_VISIBLE_DEVICES": shown}


def test_the_callers_variable_is_this_processes(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible((1,)) == {"CUDA_VISIBLE_DEVICES": "6"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible((1,)) == {"CUDA_VISIBLE_DEVICES": "1"}
