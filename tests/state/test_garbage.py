"""Python's search for garbage waits while a state is made, and goes on afterwards."""

import gc

import pytest
import torch
from eshampoo.state.garbage import not_collected
from training import parameters

from eshampoo import EShampoo


@pytest.fixture(params=[True, False], ids=["on", "off"])
def switch(request):
    """Whether the search is on, as the user has it."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_it_is_off_inside_and_afterwards_as_it_was(switch):
    with not_collected():
        assert not gc.isenabled()
        with not_collected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() == switch


def test_it_is_as_it_was_after_a_state_that_was_refused(switch):
    (p,) = parameters([torch.ones(3, 2)])
    optimizer = EShampoo([p])
    with pytest.raises(ValueError, match="not the state of an optimizer"):
        optimizer.load_state_dict({"weights": {}})
    assert gc.isenabled() == switch


def test_thousands_of_entries_are_not_searched_again_and_again():
    optimizer = EShampoo(parameters([torch.ones(2, 2)] * 400))
    entries = sum(map(len, optimizer.state.values()))
    assert entries > 5 * gc.get_threshold()[0]  # so often it would run
    ran = []

    def watch(phase, about):
        ran.append(phase)

    gc.collect()
    gc.callbacks.append(watch)
    try:
        state = optimizer.state_dict()
    finally:
        gc.callbacks.remove(watch)
    assert len(state["state"]) == 400
    assert ran.count("start") <= 1  # when all is there
