"""Ways of `eigh`: the same answer by another road, chosen by size, and measured on request."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from eshampoo.math.ways import decompose, use_eigh, way_of_eigh
from pretended import pretended_gpu, traced
from training import parameters, problem, run

from eshampoo import EShampoo, calibrate
from eshampoo.math import ways

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


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("columns", [0, 1, 20, 1536])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e34])
def test_padding_a_matrix_changes_only_the_rounding(columns, size):
    X = torch.randn(1, 512, columns)
    A = X @ X.mT * (size / 512)
    eigenvalues, V = decompose(A)
    top = torch.linalg.eigvalsh(A).amax()
    A, V = A.double(), V.double()
    assert eigenvalues.shape == (1, 512)
    assert (eigenvalues.diff(dim=1) >= 0).all()
    assert (eigenvalues <= 4 * torch.finfo(torch.float32).eps * top).sum() == max(0, 512 - columns)
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(V.mT @ V, torch.eye(512, dtype=V.dtype).unsqueeze(0), **close)
    found = torch.diag_embed(eigenvalues.double())
    torch.testing.assert_close(V.mT @ A @ V / size, found / size, **close)


def test_large_matrices_have_a_thread_each_and_the_bits_of_one_thread(monkeypatch, two_threads):
    real, seen = torch.linalg.eigh, []

    def eigh(A):
        seen.append((threading.get_ident(), torch.get_num_threads(), A.shape))
        barrier.wait(timeout=60)  # both are here at the same time
        return real(A)

    barrier = threading.Barrier(2)
    A = stack(4, 256)
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", eigh)
        found = decompose(A)
    assert {entry[1:] for entry in seen} == {(1, (256, 256))}
    assert len({entry[0] for entry in seen} - {threading.get_ident()}) == 2
    assert torch.get_num_threads() == default_of_new_threads() == 2
    torch.set_num_threads(1)
    for of_two, of_one in zip(found, decompose(A), strict=True):
        assert torch.equal(of_two, of_one)
        assert of_two.stride() == of_one.stride()


def test_an_error_on_a_thread_is_raised_and_all_threads_are_back(monkeypatch, two_threads):
    def eigh(A):
        raise torch.linalg.LinAlgError("no")

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    count = threading.active_count()
    with pytest.raises(torch.linalg.LinAlgError):
        decompose(stack(2, 256))
    assert threading.active_count() == count
    assert torch.get_num_threads() == default_of_new_threads() == 2


def default_of_new_threads():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


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
