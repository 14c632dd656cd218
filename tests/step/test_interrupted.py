"""A step that breaks off, at any operation: what is kept still belongs together."""

import copy

import pytest
import torch
from cases import METHODS, parameters, problem, run
from torch.utils._python_dispatch import TorchDispatchMode


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
