"""The library run beside its oracles."""

import math

import oracles
import torch
from keyword_table import COMMON
from training import feed, furthest, parameters, problem

import eshampoo


def check_offsets(optimizer, params):
    """By how much of the gap the checks of each block come earlier, with frequency="auto"."""
    numbers = {p: number for number, p in enumerate(params)}
    return {
        (numbers[block.parameter], block.number): block.check_offset
        for bucket in optimizer._buckets
        for block in bucket.blocks
    }


class Pair:
    """The library and its oracle with the same parameters and options."""

    def __init__(self, method, tensors, dtype=torch.float64, **options):
        self.params = parameters(tensors, dtype)
        self.optimizer = getattr(eshampoo, method)(self.params, **options)
        self.oracle = getattr(oracles, method)(self.params, **options)
        for (number, block), offset in check_offsets(self.optimizer, self.params).items():
            self.oracle.blocks[number][block].offset = offset

    def change(self, **values):
        """Write new values into the param group."""
        self.optimizer.param_groups[0].update(values)
        for name, value in values.items():
            setattr(self.oracle, name, value)

    def step(self, grads):
        feed(self.params, grads)
        self.optimizer.step()
        self.oracle.step(grads)

    def observe(self, grads):
        feed(self.params, grads)
        self.optimizer.observe()
        self.oracle.observe(grads)

    def distance(self):
        return furthest(self.params, self.oracle.params)

    def assert_equal(self, tolerance, when=""):
        for W, V in zip(self.params, self.oracle.params, strict=True):
            torch.testing.assert_close(
                W.detach().double(),
                V,
                rtol=0,
                atol=tolerance,
                msg=lambda m, s=tuple(W.shape): f"shape {s} {when}: {m}",
            )


def compare(method, shapes, steps, tolerance=1e-10, missing=(), changes=None, seed=0, **options):
    """Run library and oracle side by side and compare the parameters after every step.

    `missing` holds pairs (step, index of the parameter without a gradient); `changes` says which
    values are written into the param group before a step.
    """
    tensors, grads = problem(shapes, steps, seed, condition=3.0)
    pair = Pair(method, tensors, **{**COMMON, **options})
    moved = [W.clone() for W in tensors]
    for t, step in enumerate(grads, start=1):
        if changes and t in changes:
            pair.change(**changes[t])
        pair.step([None if (t, i) in missing else G for i, G in enumerate(step)])
        pair.assert_equal(tolerance, f"after step {t}")
    for before, W in zip(moved, pair.params, strict=True):
        assert W.numel() == 0 or not torch.equal(before, W.detach())
    return pair


def trajectory(oracle, grads):
    """All parameters after every step, as one list of vectors."""
    points = []
    for step in grads:
        oracle.step(step)
        points.append(torch.cat([W.flatten() for W in oracle.params]))
    return torch.stack(points)


def full_rank_after(oracle):
    """How many random gradients give every factor of every block full rank."""
    return max(
        (
            math.ceil(L.shape[0] ** 2 / block.M.numel())
            for blocks in oracle.blocks
            for block in blocks
            for L in block.L
            if L is not None
        ),
        default=1,
    )
