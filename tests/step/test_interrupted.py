"""A step that breaks off, at any operation: what is kept still belongs together."""

import _thread
import copy
import signal
from functools import partial

import interrupts
import pytest
import torch
from cases import METHODS, parameters, problem, run
from torch.utils._python_dispatch import TorchDispatchMode

from eshampoo.math.at_once import at_once, call


class Breaks(TorchDispatchMode):
    """Raises instead of carrying out operation number `at`."""

    def __init__(self, at):
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise MemoryError(str(function))
        return function(*args, **(kwargs or {}))


def seen(optimizer, p):
    """Parameter, step, and in the coordinates of the parameter the factors and the momentum."""
    s = {name: v[0].clone() for name, v in optimizer.state[p].items()}
    rotated = optimizer.method.home == "eigenbasis"
    found = [p.detach().clone(), s["step"]]
    M = s["exp_avg"]
    for mode in (0, 1):
        Q, A = s[f"basis_{mode}"], s[f"factor_{mode}"]
        found.append(Q @ A @ Q.T if rotated else A)
        assert torch.allclose(Q.T @ Q, torch.eye(len(Q), dtype=Q.dtype), atol=1e-10)
        if rotated:
            M = torch.tensordot(Q, M, ([1], [mode])).movedim(0, mode)
    return [*found, M]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("EShampoo", {}),
        ("EShampoo", {"solver": "partial"}),
        ("EShampoo", {"correction": "basis_aware"}),
        ("Shampoo", {}),
        ("SOAP", {}),
        ("KLShampoo", {}),
    ],
)
def test_an_error_at_any_operation_leaves_basis_factor_and_momentum_together(method, more):
    tensors, grads = problem([(4, 3)], 4)
    params = parameters(tensors)
    options = {"frequency": 4, "tau": 0.0, **more}
    first = METHODS[method](params, **options)
    run(first, params, grads[:3] if method != "SOAP" else [*grads[:1], *grads[:3]])
    before = seen(first, params[0])
    twin, theirs = copy.deepcopy((params, first))
    run(theirs, twin, grads[3:])
    after = seen(theirs, twin[0])
    assert theirs.basis_computations > first.basis_computations
    for at in range(1, 10_000):
        copies, optimizer = copy.deepcopy((params, first))
        copies[0].grad = grads[3][0].clone()
        breaks = Breaks(at)
        try:
            with breaks:
                optimizer.step()
            break  # there was no such operation
        except MemoryError as error:
            now, what = seen(optimizer, copies[0]), f"{at}: {error}"
        moved = not torch.equal(now[0], before[0])
        assert torch.equal(now[0], after[0] if moved else before[0]), what
        assert now[1] == (after if moved else before)[1], what
        for found, old, new in zip(now[2:], before[2:], after[2:], strict=True):
            assert torch.allclose(found, old) or torch.allclose(found, new), what
        optimizer.step()  # and it goes on
        assert copies[0].isfinite().all(), what
    assert at > 50


@pytest.mark.slow
def test_after_an_error_in_the_first_check_shampoo_still_gets_its_first_root():
    """The criterion holds, so that no other check would compute one."""
    tensors, grads = problem([(4, 3)], 2)
    params = parameters(tensors)
    first = METHODS["Shampoo"](params, frequency=2, tau=1.0, graft=None)
    run(first, params, grads[:1])
    for at in range(1, 10_000):
        copies, optimizer = copy.deepcopy((params, first))
        copies[0].grad = grads[1][0].clone()
        try:
            with Breaks(at):
                optimizer.step()
            break
        except MemoryError as error:
            what = f"{at}: {error}"
        if torch.equal(copies[0], params[0]):
            optimizer.step()
        root = optimizer.state[copies[0]]["root_0"][0]
        assert not torch.equal(root, torch.eye(4, dtype=root.dtype)), what
    assert at > 50


@pytest.fixture
def alarm():
    """The signal of the trials raises; afterwards it does what it did."""
    before = signal.signal(signal.SIGALRM, interrupts.raise_now)
    yield signal.SIGALRM
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_no_signal_comes_between_calls_that_are_made_at_once(alarm):
    seen = []
    calls = [partial(seen.append, 1), partial(_thread.interrupt_main, alarm)]
    with pytest.raises(interrupts.Interrupted):
        at_once(map(call, (*calls, partial(seen.append, 2))))
    assert seen == [1, 2]


@pytest.mark.slow
def test_a_step_that_a_signal_ends_is_counted_where_the_parameter_has_moved(alarm):
    torch.set_default_dtype(torch.float64)
    try:
        assert interrupts.trials(50, seed=1)["interrupted"] >= 50
    finally:
        torch.set_default_dtype(torch.float32)
