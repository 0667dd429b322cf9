"""A failure inside a schedule says in which iteration it was, and stays the kind of failure that it is."""

import pytest

from megatron_lite.errors import PeerLost, RankFailure
from megatron_lite.training import train_step


@pytest.mark.parametrize("kind", [RankFailure, PeerLost])
def test_a_witness_of_a_lost_rank_stays_a_witness(kind, monkeypatch):
    """Taken for the cause, it would leave at once, and be the first rank that the launcher sees fail."""

    def schedule(**arguments):
        raise kind("rank 1: all_reduce failed", why="reason", fix="remedy")

    monkeypatch.setattr(train_step, "get_forward_backward_func", lambda *sizes: schedule)
    with pytest.raises(kind) as told:
        train_step._forward_backward(7)(model=[None])
    assert type(told.value) is kind and told.value.what == "iteration 7, rank 1: all_reduce failed"
    assert (told.value.why, told.value.fix) == ("reason", "remedy")
