"""Tests that run on several ranks.

The body of a test with the mark `ranks(2, 4)` runs on every rank of a world of 2 processes and of a
world of 4, as two items; what it asserts must hold on each rank. Its argument `world` says where it
runs, its other arguments are ordinary fixtures. What it returns on rank 0, the differences that it
found, is printed (`pytest -s`). All tests of a pytest process share its worlds.
"""

import pytest
from worlds import RankError, Ranks


def pytest_generate_tests(metafunc):
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None:
        names = [f"{size} ranks" if size > 1 else "1 rank" for size in mark.args]
        metafunc.parametrize("world", mark.args, ids=names, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Have the ranks call the test instead of calling it here."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    ranks = arguments.pop("world")
    try:
        found = ranks.run(pyfuncitem.obj, **mark.kwargs, **arguments)
    except RankError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    print("" if found is None else found)
    return True


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    """Worlds by their number of ranks, each started when it is first needed."""
    folder = tmp_path_factory.mktemp("worlds")
    made = {size: Ranks(size, folder) for size in (1, 2, 3, 4, 5)}
    yield made
    for ranks in made.values():
        ranks.stop()


@pytest.fixture
def world(request, worlds):
    """In a test with the mark `ranks`: where its body runs, a `worlds.World`."""
    return worlds[request.param]
