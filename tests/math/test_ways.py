"""Ways of `eigh`: the same answer by another road, chosen by size, and measured on request."""

import pytest
import torch
from cases import parameters, problem, run
from pretended import pretended_gpu, traced

from eshampoo import EShampoo, calibrate
from eshampoo.math import ways
from eshampoo.math.ways import decompose, use_eigh, way_of_eigh

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_chosen():
    yield
    ways.CHOSEN.clear()


def stack(count, d):
    X = torch.randn(count, d, d, dtype=torch.float64)
    return X @ X.mT


@pytest.mark.parametrize("way", ["batched", "single", "host"])
def test_every_way_diagonalises(way):
    A = stack(3, 5)
    eigenvalues, V = decompose(A, way)
    assert (eigenvalues.diff(dim=1) >= 0).all()
    torch.testing.assert_close(V.mT @ A @ V, torch.diag_embed(eigenvalues), rtol=0, atol=1e-12)
    torch.testing.assert_close(V.mT @ V, torch.eye(5, dtype=V.dtype).expand_as(V))


def test_the_way_goes_by_size_and_type_of_device():
    assert way_of_eigh(7, CPU) == "batched"
    use_eigh("cpu", {64: "single", 8: "host"})
    found = [way_of_eigh(size, CPU) for size in (1, 8, 9, 64, 65)]
    assert found == ["host", "host", "single", "single", "single"]
    assert way_of_eigh(7, torch.device("cuda:1")) == "batched"
    use_eigh("cpu", {})
    assert way_of_eigh(7, CPU) == "batched"


@pytest.mark.parametrize(
    ("choice", "calls"), [({}, [(3, 6, 6)]), ({4: "batched", 6: "single"}, [(6, 6)] * 3)]
)
def test_a_refresh_takes_the_way_that_was_chosen(choice, calls, monkeypatch):
    real, seen = torch.linalg.eigh, []
    monkeypatch.setattr(torch.linalg, "eigh", lambda A: seen.append(tuple(A.shape)) or real(A))
    use_eigh("cpu", choice)
    tensors, grads = problem([(6,)] * 3, 1)
    params = parameters(tensors)
    run(EShampoo(params, vectors="full", frequency=1, tau=0.0), params, grads)
    assert seen == calls


@pytest.mark.slow
def test_the_way_over_the_host_leaves_the_device_and_comes_back():
    with pretended_gpu():
        A = torch.empty(2, 4, 4, device="cuda")
        operations = {op.name.split(".")[1]: op for op in traced(lambda: decompose(A, "host"))}
        assert operations["_linalg_eigh"].devices == {"cpu"}
        assert {x.device.type for x in decompose(A, "host")} == {"cuda"}
        assert all(op.devices == {"cuda"} for op in traced(lambda: decompose(A, "batched")))


@pytest.mark.parametrize(
    ("choice", "told"),
    [({8: "fast"}, "'batched', 'single', 'host'"), ({0: "host"}, "int from 1 on")],
)
def test_a_wrong_choice_is_refused_and_changes_nothing(choice, told):
    use_eigh("cpu", {8: "single"})
    with pytest.raises(ValueError, match=told):
        use_eigh("cpu", choice)
    assert way_of_eigh(8, CPU) == "single"


def test_what_calibrate_prints_is_the_setting_that_it_found(capsys, monkeypatch):
    fastest = {4: "batched", 6: "single", 9: "single"}

    def measure(size, device, seconds):
        return {way: 1.0 if way == fastest[size] else 2.0 for way in ("batched", "single")}

    monkeypatch.setattr(calibrate, "measure", measure)
    calibrate.main(["--device", "cpu", "--sizes", "4", "6", "9"])
    code = [line.strip() for line in capsys.readouterr().out.splitlines() if "use_eigh" in line]
    exec("\n".join(code), {})
    assert ways.CHOSEN == {"cpu": {4: "batched", 9: "single"}}


def test_calibrate_measures_the_ways_that_there_are():
    found = calibrate.measure(4, "cpu", seconds=0.0, count=2)
    assert found.keys() == {"batched", "single"}
    assert all(0 < seconds < float("inf") for seconds in found.values())
