"""Signals at random moments inside `step()`: what is kept still belongs together.

    python tests/interrupts.py [--interrupts 1000] [--seed S]

A timer raises an exception in the middle of a step with a change of basis, as Ctrl-C would. Python
lets a signal in between two of its instructions, so an operation of torch is carried out or is not.
Afterwards every parameter has moved as it would have or not at all; every Q is orthogonal; and each
factor and momentum, seen in the coordinates of the parameter, is the one of before or of after. The
step is counted where the parameter has moved and nowhere else, and can be taken again.
"""

import argparse
import copy
import random
import signal
import sys
import time
import warnings
from collections import Counter

import torch
from cases import METHODS, parameters, problem, run

SHAPES = [(6, 5), (5, 6), (4,), (3, 3, 2)]
OPTIONS = {"frequency": 4, "tau": 0.0}
SUBJECTS = [
    ("EShampoo", {}),
    ("EShampoo", {"solver": "partial", "budget": None}),
    ("EShampoo", {"correction": "basis_aware", "vectors": "full"}),
    ("Shampoo", {}),
    ("SOAP", {}),
    ("KLShampoo", {}),
    ("CASPR", {}),
    ("FullMatrixAdam", {}),
]


class Interrupted(BaseException):
    """What the signal raises."""


def raise_now(*_):
    raise Interrupted


def kept(optimizer, p):
    """Factors and momentum of a parameter in its own coordinates, and how far Q is orthogonal."""
    s = {name: value.clone() for name, value in optimizer.state[p].items()}
    M, found, apart = s["exp_avg"], [], 0.0
    rotated = optimizer.method.home == "eigenbasis"
    for mode in range(3):
        if f"basis_{mode}" in s:
            Q, A = s[f"basis_{mode}"], s[f"factor_{mode}"]
            apart = max(apart, (Q.mT @ Q - torch.eye(Q.shape[-1])).abs().max().item())
            found.append(Q @ A @ Q.mT if rotated else A)
            if rotated:
                M = torch.einsum("nij,n...j->n...i", Q, M.movedim(mode + 1, -1))
                M = M.movedim(-1, mode + 1)
    return [M, *found], apart


def check(optimizer, params, before, after):
    """Compare what an interrupted step has left with what was before and would be after."""
    for p, old, new in zip(params, before, after, strict=True):
        stands, moved = torch.equal(p.detach(), old[0]), torch.equal(p.detach(), new[0])
        assert stands or moved, "a parameter has moved half way"
        now, apart = kept(optimizer, p)
        assert apart < 1e-10, f"a basis is {apart} from orthogonal"
        for value, *choices in zip(now, old[1], new[1], strict=True):
            assert any(torch.allclose(value, x, rtol=1e-9, atol=1e-12) for x in choices)
        step = optimizer.state[p]["step"].view(-1)
        assert torch.equal(step, (new if moved else old)[2]), "moved but not counted, or counted"


def facts(optimizer, params):
    return [
        (p.detach().clone(), kept(optimizer, p)[0], optimizer.state[p]["step"].view(-1).clone())
        for p in params
    ]


def trials(number, seed):
    """Interrupt `number` steps; return what was seen, as counts."""
    chance, seen = random.Random(seed), Counter()
    signal.signal(signal.SIGALRM, raise_now)
    while seen["interrupted"] < number:
        method, more = SUBJECTS[chance.randrange(len(SUBJECTS))]
        tensors, grads = problem(SHAPES, 4, seed=chance.randrange(1000))
        params = parameters(tensors)
        first = METHODS[method](params, **OPTIONS, **more)
        run(first, params, [*grads[:1], *grads[:3]] if method == "SOAP" else grads[:3])
        before = facts(first, params)
        theirs, twin = copy.deepcopy((params, first))
        begin = time.perf_counter()
        run(twin, theirs, grads[3:])
        seconds = time.perf_counter() - begin
        after = facts(twin, theirs)
        for _ in range(10):
            own, optimizer = copy.deepcopy((params, first))
            for p, G in zip(own, grads[3], strict=True):
                p.grad = G.clone()
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, seconds))
                optimizer.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
                seen["too late"] += 1
                continue
            except Interrupted:
                seen["interrupted"] += 1
            check(optimizer, own, before, after)
            optimizer.step()
            assert all(p.isfinite().all() for p in own), "it does not go on"
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interrupts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    print(f"{arguments.interrupts} interrupts, seed {arguments.seed}", flush=True)
    seen = trials(arguments.interrupts, arguments.seed)
    print(f"{seen['interrupted']} steps interrupted: what they left belongs together")
    return 0


if __name__ == "__main__":
    sys.exit(main())
