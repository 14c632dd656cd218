"""A GPU without a GPU: what a step would do to its tensors, and a step that is only replayed.

    with pretended_gpu():
        params = [nn.Parameter(torch.empty(12, 20, device="cuda"))]
        ...
        operations = traced(optimizer.step)

FakeTensors say that they are on a device and have no values. A read of a value raises, and every
operation tells on which devices its tensors are.
"""

from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Operation(NamedTuple):
    """What was dispatched: its name, what it was given with "tensor" for tensors, and of those
    that went in and came out the types of their devices and their dtypes."""

    name: str
    given: object
    devices: set[str]
    dtypes: set[torch.dtype]


class Trace(TorchDispatchMode):
    """Writes down every operation."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace not in ("aten", "_foreach"):  # a note for the profiler, or a question
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        given = tree_map_only(Tensor, lambda _: "tensor", (args, kwargs))
        devices = {x.device.type for x in tensors}
        self.operations.append(Operation(str(func), given, devices, {x.dtype for x in tensors}))
        return out


class Replay(TorchDispatchMode):
    """Keeps the operations of a step with their tensors, and carries them out again.

    As in a CUDA graph, what the step made is made anew, and all else is the tensors that were.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def again(self):
        """Once more."""
        made = {}

        def now(x):
            return made.get(id(x), x)

        for func, args, kwargs, before in self.calls:
            out = func(*tree_map_only(Tensor, now, args), **tree_map_only(Tensor, now, kwargs))
            pairs = zip(tree_leaves(before), tree_leaves(out), strict=True)
            made.update({id(old): new for old, new in pairs if isinstance(old, Tensor)})


class WithoutCuda(TorchFunctionMode):
    """The same by other operations, where a build of torch without CUDA asks for CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__:
            return at(*args)
        if func is Tensor.__setitem__:
            X, index, value = args
            target = at(X, index)
            return copy_(target, value) if isinstance(value, Tensor) else target.fill_(value)
        if func is Tensor.copy_:
            return copy_(*args)
        if func is Tensor.__invert__:
            return args[0] == 0
        return func(*args, **(kwargs or {}))


def copy_(X, value):
    torch._foreach_copy_([X], [value.expand_as(X)])
    return X


def at(X, index):
    """X[index] for numbers, slices and "...", which make a view."""
    dim, indices = 0, index if isinstance(index, tuple) else (index,)
    for place, i in enumerate(indices):
        if i is Ellipsis:
            dim = X.dim() - (len(indices) - place - 1)
        elif isinstance(i, slice):
            X = torch.ops.aten.slice(X, dim, i.start, i.stop, i.step or 1)
            dim += 1
        elif isinstance(i, int):
            X = X.select(dim, i)
        else:
            raise NotImplementedError(f"{i!r} is no number, no slice and no ellipsis")
    return X


@contextmanager
def pretended_gpu():
    """What is made with device="cuda" in here is fake."""
    with FakeTensorMode(allow_non_fake_inputs=True), WithoutCuda():
        yield


def traced(action):
    """Every operation that it dispatched."""
    with Trace() as trace:
        action()
    return trace.operations
