"""All bits of float32 for the products of a step, inside autocast and whatever the process says."""

import pytest
import torch
from training import assert_same, feed, parameters, problem

from benchmarks.claims.precision import drift, rounded
from eshampoo import EShampoo, Shampoo
from eshampoo.step import phases, precision, refresh

if torch.__version__ < "2.9":
    pytest.skip("settings per backend came with torch 2.9", allow_module_level=True)

CUDA, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def assign(where, name, value):
    return lambda: setattr(where, name, value)


# Every way to lower the precision, of torch's older and of its newer API.
WAYS = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": assign(CUDA, "allow_tf32", True),
    "cuda.matmul": assign(CUDA, "fp32_precision", "tf32"),
    "mkldnn.matmul": assign(CPU, "fp32_precision", "bf16"),
    "cudnn": assign(torch.backends.cudnn, "fp32_precision", "tf32"),
    "everywhere": assign(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def _as_it_was():
    """Leave the process as torch starts it."""
    before = torch.backends.cudnn.fp32_precision
    yield
    torch.backends.fp32_precision = "none"
    torch.backends.cudnn.fp32_precision = before
    torch.set_float32_matmul_precision("highest")
    CUDA.fp32_precision = CPU.fp32_precision = "none"


def settings():
    """Everything that can be asked; torch refuses to answer where settings contradict."""

    def ask(question):
        try:
            return question()
        except RuntimeError:
            return "contradiction"

    return (
        ask(torch.get_float32_matmul_precision),
        ask(lambda: CUDA.allow_tf32),
        CUDA.fp32_precision,
        CPU.fp32_precision,
        torch.backends.cudnn.fp32_precision,
        torch.backends.fp32_precision,
    )


def seen_inside(optimizer, monkeypatch):
    """What a step finds set."""
    found = []

    def take_step(tasks):
        found.append((precision.lowered(), *settings()))
        return [], []

    monkeypatch.setattr("eshampoo.optimizer.take_step", take_step)
    optimizer.step()
    return found[0]


@pytest.mark.parametrize("way", WAYS)
def test_however_it_was_lowered_a_step_has_all_bits_and_the_setting_comes_back(way, monkeypatch):
    optimizer = EShampoo(parameters([torch.ones(3, 3)]))
    WAYS[way]()
    before = settings()
    assert precision.lowered()
    lowered, *inside = seen_inside(optimizer, monkeypatch)
    assert not lowered
    assert inside[:4] == ["highest", False, "ieee", "ieee"]
    assert settings() == before


def test_what_followed_the_general_setting_follows_it_afterwards():
    optimizer = EShampoo(parameters([torch.ones(3, 3)]))
    torch.backends.fp32_precision = "tf32"
    optimizer.step()
    torch.backends.fp32_precision = "ieee"
    assert CUDA.fp32_precision == CPU.fp32_precision == "ieee"


def test_settings_and_autocast_come_back_after_an_error(monkeypatch):
    optimizer = EShampoo(parameters([torch.ones(3, 3)]))

    def take_step(tasks):
        assert not torch.is_autocast_enabled("cpu")
        raise ArithmeticError

    monkeypatch.setattr("eshampoo.optimizer.take_step", take_step)
    torch.set_float32_matmul_precision("medium")
    before = settings()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ArithmeticError):
            optimizer.step()
        assert torch.is_autocast_enabled("cpu")
    assert settings() == before


def test_inherit_leaves_the_setting_and_one_group_with_highest_is_enough(monkeypatch):
    p, q = parameters([torch.ones(3, 3), torch.ones(2, 2)])
    torch.set_float32_matmul_precision("high")
    inherits = EShampoo([p], precision="inherit")
    assert seen_inside(inherits, monkeypatch)[0]
    mixed = EShampoo([{"params": [p]}, {"params": [q], "precision": "inherit"}])
    assert not seen_inside(mixed, monkeypatch)[0]
    mixed.param_groups[0]["precision"] = "inherit"  # acts at the next step
    assert seen_inside(mixed, monkeypatch)[0]


@pytest.mark.parametrize("setting", ["highest", "high", "inherit"])
def test_a_step_inside_autocast_has_the_bits_of_one_outside(setting):
    tensors, grads = problem([(6, 5), (4,)], 6)
    runs = []
    for inside in (False, True):
        params = parameters(tensors, torch.float32)
        optimizer = EShampoo(params, frequency=2, precision=setting)
        for step in grads:
            feed(params, step)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                optimizer.step()
        runs.append(([*params], optimizer.state_dict()["state"]))
    assert_same(*runs)


def test_a_closure_keeps_autocast_and_the_setting():
    (p,) = parameters([torch.ones(3, 3)])
    optimizer, seen = EShampoo([p]), []

    def closure():
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()))
        return 0.0

    torch.set_float32_matmul_precision("high")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.step(closure)
    assert seen == [(True, "high")]


# "high" -------------------------------------------------------------------------------------------


def test_high_lowers_rotations_and_gram_products_and_nothing_else(monkeypatch):
    """Whatever the process is set to; and the setting comes back."""
    seen = {"low": set(), "full": set()}

    def watched(module, name):
        real = getattr(module, name)

        def function(*args, **kwargs):
            seen["low" if precision.lowered() else "full"].add(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, function)

    for name in ("rotate_", "average_gram_"):
        watched(phases, name)
    for name in ("solve", "rotate_mode", "orthonormalize", "off_norm", "inverse_root"):
        watched(refresh, name)
    monkeypatch.setattr(refresh, "REORTHONORMALIZE", 1)
    for way in ("as it was", *WAYS):
        if way != "as it was":
            WAYS[way]()
        before = settings()
        for method in (EShampoo, Shampoo):
            params = parameters(problem([(6, 5)], 1)[0], torch.float32)
            optimizer = method(params, frequency=1, tau=0.0, budget=None, precision="high")
            for step in problem([(6, 5)], 3)[1]:
                feed(params, step)
                optimizer.step()
        assert settings() == before, way
    assert seen["low"] == {"rotate_", "average_gram_"}
    assert seen["full"] == {"solve", "rotate_mode", "orthonormalize", "off_norm", "inverse_root"}


def test_the_highest_precision_that_a_group_asks_for_holds_for_all(monkeypatch):
    p, q = parameters([torch.ones(3, 3), torch.ones(2, 2)])
    mixed = EShampoo([{"params": [p], "precision": "high"}, {"params": [q]}])
    assert not seen_inside(mixed, monkeypatch)[0]
    mixed.param_groups[1]["precision"] = "inherit"
    assert seen_inside(mixed, monkeypatch)[0]


@pytest.mark.parametrize("setting", ["highest", "high"])
def test_the_floor_knows_the_rounding_of_operands(setting):
    """Operands of 7 bits leave 2⁻⁷/√d of ‖G‖ where there was nothing; Adam would enlarge it."""
    (p,) = parameters([torch.zeros(16, 24)], torch.float32)
    optimizer = EShampoo([p], frequency=1, tau=0.0, rms=None, precision=setting)
    optimizer.step()
    (bucket,) = optimizer._buckets
    (o,) = optimizer._options()
    expected = 2**-7 / 4 if setting == "high" else 64 * 2**-23
    assert phases.least_share(bucket.state, o) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bits", [10, 7])
def test_with_operands_of_few_bits_bases_stay_orthogonal(bits):
    """Emulated: rotations and Gram products round their operands as the hardware does."""
    exact, emulated = (drift(n, 40)[0] for n in (24, bits))
    assert 0 < emulated < 2 * exact + 1e-6


def test_emulated_operands_have_the_bits_that_they_should():
    X = torch.randn(1, 50, 50)
    assert torch.equal(rounded(X, 7), X.bfloat16().float())
    half = X.half().float()  # 10 bits as well, for numbers of this size
    assert torch.equal(rounded(half, 10), half)
    assert ((rounded(X, 10) - X).abs() <= 2**-11 * X.abs()).all()
