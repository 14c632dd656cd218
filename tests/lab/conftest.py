"""No data and no cache of the machine's own: everything that a test needs is made in it."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ESHAMPOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ESHAMPOO_DATA", raising=False)
