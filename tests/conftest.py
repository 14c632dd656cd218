"""One thread, a seeded generator for every test, and worlds of ranks that stay on one worker."""

import re

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests on ranks go to two workers, so that each world is started by one of them.

    Everything else goes wherever there is time. (The mark `xdist_group` would say the same, but
    xdist 3.8 does not see it with pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByWorld(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return ByWorld(config, log)


def group_of(nodeid):
    """Tests with the same group run on one worker; the two groups take about as long.

    What four ranks have saved, fewer load, so all of these tests belong to the larger world.
    """
    if "test_with_the_real_package" in nodeid:
        return "recipes"  # whose processes run many jobs
    if "test_resharding.py" in nodeid or "[4 ranks" in nodeid:
        return "four ranks"
    return "fewer ranks" if re.search(r"\[\d ranks?\b", nodeid) else nodeid


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def generator():
    """A generator of its own, seeded."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def two_threads():
    """Threads share the work of an operation, as they do for users; tests have one otherwise."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
