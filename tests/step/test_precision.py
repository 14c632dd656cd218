"""Products of a step have all bits of float32, inside autocast and whatever the process is set to.

No CPU here multiplies with fewer bits, so what a GPU does with TF32 is emulated: while the setting
allows it, the operands of every product are rounded to 10 bits.
"""

import gc
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from cases import METHODS, assert_same, departure, feed, furthest, parameters, problem, run
from counting import PRODUCTS
from interrupts import Interrupted
from torch.utils._python_dispatch import TorchDispatchMode

from eshampoo import EShampoo
from eshampoo.step import precision
from eshampoo.step.step import TAKE

if torch.__version__ < "2.9":
    pytest.skip("settings per backend came with torch 2.9", allow_module_level=True)

CUDA, CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def rounded(X):
    """The nearest numbers with 10 bits after the point, as TF32 has them."""
    bits = X.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class TF32(TorchDispatchMode):
    """Multiplies float32 as a GPU does: from rounded operands, if the process is set to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        if name in PRODUCTS and CUDA.fp32_precision == "tf32" and args[0].dtype == torch.float32:
            first = 1 if name.startswith(("baddbmm", "addmm")) else 0  # what it is added to is not
            args = (*args[:first], *map(rounded, args[first:]))
        return func(*args, **(kwargs or {}))


def legacy(value):
    return lambda: torch.set_float32_matmul_precision(value)


def assign(where, name, value):
    return lambda: setattr(where, name, value)


# Every way to lower the precision.
WAYS = {
    "high": legacy("high"),
    "medium": legacy("medium"),
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

    def take_step(tasks, batches):
        found.append((precision.lowered(), *settings()))
        return [], []

    monkeypatch.setitem(TAKE, "step", take_step)
    optimizer.step()
    return found[0]


# TF32 ---------------------------------------------------------------------------------------------


def after_200_steps(method, **options):
    """Weights and the worst departure of a basis from orthogonality."""
    tensors, grads = problem([(12, 8), (8, 12)], 200, condition=3.0)
    params = parameters(tensors, torch.float32)
    keywords = {"lr": 3e-2, "frequency": 5, "tau": 0.0} | options
    if method != "FullMatrixAdam":
        keywords["merge_dims"] = False
    optimizer = METHODS[method](params, **keywords)
    with TF32():
        run(optimizer, params, grads)
    states = list(optimizer.state.values())
    bases = [s[name] for s in states for name in ("basis_0", "basis_1") if name in s]
    return params, max(map(departure, bases), default=0.0)


def test_the_emulation_rounds_to_ten_bits():
    X = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-11 + 2**-20, -3.0000001, 0.0])
    expected = torch.tensor([1.0, 1 + 2**-10, 1.0, 1 + 2**-10, -3.0, 0.0])
    assert torch.equal(rounded(X), expected)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_tf32_spoils_bases_and_weights_in_200_steps_and_with_the_guard_no_bit(method):
    expected, orthogonal = after_200_steps(method)
    torch.set_float32_matmul_precision("high")
    params, departed = after_200_steps(method)
    assert departed == orthogonal < 1e-5
    assert furthest(params, expected) == 0.0
    params, departed = after_200_steps(method, precision="inherit")
    assert departed > 1e-5
    assert furthest(params, expected) > 1e-3


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


def test_a_setting_that_is_full_already_is_not_touched(monkeypatch):
    before = settings()
    assert seen_inside(EShampoo(parameters([torch.ones(3, 3)])), monkeypatch)[1:] == before
    assert CUDA.fp32_precision == "none"


def test_the_setting_comes_back_after_an_error(monkeypatch):
    optimizer = EShampoo(parameters([torch.ones(3, 3)]))

    def take_step(tasks, batches):
        raise ArithmeticError

    monkeypatch.setitem(TAKE, "step", take_step)
    torch.set_float32_matmul_precision("medium")
    before = settings()
    with pytest.raises(ArithmeticError), torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.step()
    assert settings() == before
    assert not torch.is_autocast_enabled("cpu")


def test_inherit_leaves_the_setting_and_one_group_with_highest_is_enough(monkeypatch):
    p, q = parameters([torch.ones(3, 3), torch.ones(2, 2)])
    torch.set_float32_matmul_precision("high")
    inherits = EShampoo([p], precision="inherit")
    assert seen_inside(inherits, monkeypatch)[0]
    mixed = EShampoo([{"params": [p]}, {"params": [q], "precision": "inherit"}])
    assert not seen_inside(mixed, monkeypatch)[0]
    mixed.param_groups[0]["precision"] = "inherit"  # acts at the next step
    assert seen_inside(mixed, monkeypatch)[0]


def test_steps_in_two_threads_share_the_guard_and_the_last_one_puts_it_back():
    torch.set_float32_matmul_precision("high")
    before, seen = settings(), []
    entered, leave = threading.Event(), threading.Event()

    def other():
        with precision.guarded({"cpu"}, highest=True):
            entered.set()
            leave.wait(60)
            seen.append(precision.lowered())

    thread = threading.Thread(target=other)
    with precision.guarded({"cpu"}, highest=True):
        thread.start()
        assert entered.wait(60)
    seen.append(precision.lowered())  # the other step is still under way
    leave.set()
    thread.join()
    assert seen == [False, False]
    assert settings() == before


def interrupt_guard(moment):
    """Raise at the n-th moment at which Python handles signals: a call begins, or one in C ends."""
    left = moment

    def look(frame, event, _):
        nonlocal left
        code = frame.f_code
        # Python ignores what is raised while a generator closes.
        if code.co_filename == __file__ or code.co_name == "<genexpr>":
            return
        if event in ("call", "c_return"):
            left -= 1
            if left == 0:
                raise Interrupted

    sys.setprofile(look)
    try:
        with precision.guarded({"cpu"}, highest=True):
            pass
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_at_any_moment_of_the_guard_costs_no_setting(way):
    """The next step puts back what an interrupted one could not."""
    WAYS[way]()
    before, errors = settings(), []
    for moment in range(1, 1000):
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                interrupt_guard(moment)
            break
        except Interrupted as error:
            errors.append(error)  # with its frames, as a notebook keeps them
        with precision.guarded({"cpu"}, highest=True):
            assert not precision.lowered()
        assert settings() == before, moment
    assert 20 < moment < 1000
    errors.clear()
    gc.collect()
    assert settings() == before
    assert not torch.is_autocast_enabled("cpu")


def test_what_is_set_during_a_step_stays():
    torch.set_float32_matmul_precision("medium")
    with precision.guarded({"cpu"}, highest=True):
        torch.set_float32_matmul_precision("high")
    assert torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision("highest")
    with precision.guarded({"cpu"}, highest=True):
        assert torch.get_float32_matmul_precision() == "highest"  # nothing is left to put back
    assert torch.get_float32_matmul_precision() == "highest"


# Autocast -----------------------------------------------------------------------------------------


@contextmanager
def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("setting", ["highest", "inherit"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_inside_autocast_has_the_bits_of_one_outside(method, setting):
    tensors, grads = problem([(6, 5), (4,)], 6)
    runs = []
    for inside in (False, True):
        params = parameters(tensors, torch.float32)
        optimizer = METHODS[method](params, frequency=2, precision=setting)
        for step in grads:
            feed(params, step)
            if inside:
                with autocast():
                    optimizer.step()
            else:
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
    with autocast():
        optimizer.step(closure)
    assert seen == [(True, "high")]
