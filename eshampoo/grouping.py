"""Sort a model's parameters into ordinary param groups by kind."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

KINDS = ("matrices", "vectors", "embeddings", "head")


def parameter_groups(
    model: nn.Module,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    head: str | None = None,
) -> list[dict[str, Any]]:
    """Param groups of a model's matrices, vectors, embeddings and output head.

    Each group has the key "kind" and named parameters; empty kinds are left out. A parameter that
    is shared, such as an output head tied to an embedding, is in the group of its first kind:
    embeddings, then head, then by its number of dimensions.

    Args:
        model: any module.
        options: per kind, the hyperparameters of its group.
        head: name of the module that makes the outputs; by default the last `nn.Linear`.

    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    >>> groups = parameter_groups(model, {"embeddings": {"matrices": "adam"}})
    >>> [(group["kind"], [name for name, _ in group["params"]]) for group in groups]
    [('matrices', ['1.weight']), ('vectors', ['1.bias', '2.bias']), ('embeddings', ['0.weight']), \
('head', ['2.weight'])]
    """
    options = options or {}
    unknown = set(options) - set(KINDS)
    if unknown:
        raise ValueError(
            f"options for {sorted(unknown)}: the kinds are {', '.join(KINDS)}; use one of them"
        )
    embeddings, heads = _special(model, head)
    members: dict[str, list[tuple[str, Tensor]]] = {kind: [] for kind in KINDS}
    for name, p in model.named_parameters():
        if p in embeddings:
            kind = "embeddings"
        elif p.dim() < 2:
            kind = "vectors"
        else:
            kind = "head" if p in heads else "matrices"
        members[kind].append((name, p))
    return [
        {"params": params, "kind": kind, **options.get(kind, {})}
        for kind, params in members.items()
        if params
    ]


def _special(model: nn.Module, head: str | None) -> tuple[set[Tensor], set[Tensor]]:
    """The weights of all embeddings, and the parameters of the output head."""
    modules = dict(model.named_modules())
    if head is not None and head not in modules:
        raise ValueError(
            f"head={head!r} is not a module of the model; name one of {', '.join(modules)}"
        )
    embeddings = {
        m.weight for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    }
    linear = [m for m in modules.values() if isinstance(m, nn.Linear)]
    output = modules[head] if head is not None else (linear[-1] if linear else None)
    return embeddings, set() if output is None else set(output.parameters())
