"""Sort a model's parameters into ordinary param groups, and name an optimizer's parameters."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

KINDS = ("matrices", "vectors", "embeddings", "head")


def parameter_groups(
    model: nn.Module,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    head: str | None = None,
) -> list[dict[str, Any]]:
    """Sort a model's parameters into groups: matrices, vectors, embeddings and output head.

    Each group has the key "kind" and named parameters. A kind without parameters has no group. A
    parameter of several kinds, such as an output head tied to an embedding, goes to the first of
    embeddings, vectors, head and matrices.

    Args:
        model: any module.
        options: the hyperparameters of each group, by kind.
        head: name of the module that makes the outputs, by default the last `nn.Linear`.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
        >>> groups = parameter_groups(model, {"embeddings": {"matrices": "adam"}})
        >>> for group in groups:
        ...     print(group["kind"], [name for name, _ in group["params"]])
        matrices ['1.weight']
        vectors ['1.bias', '2.bias']
        embeddings ['0.weight']
        head ['2.weight']
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


def name_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Name the parameters of an optimizer that was built without names.

    Some frameworks build the optimizer themselves, from parameters without names. This function
    writes the `param_names` that `model.named_parameters()` would have given into every param
    group, so that `basis_report()` and errors show names. If you add a group later, torch wants
    names for it, too.

    Examples:
        >>> import torch
        >>> model = nn.Linear(3, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> name_parameters(optimizer, model)
        >>> optimizer.param_groups[0]["param_names"]
        ['weight', 'bias']
    """
    names = {p: name for name, p in model.named_parameters()}
    missing = [
        f"parameter {number} of group {index}, of shape {tuple(p.shape)},"
        for index, group in enumerate(optimizer.param_groups)
        for number, p in enumerate(group["params"])
        if p not in names
    ]
    if missing:
        raise ValueError(
            f"{missing[0]} is not in the model ({len(missing)} parameters are not); all must be: "
            "pass the model that the optimizer trains, as it is after wrapping or sharding"
        )
    for group in optimizer.param_groups:
        group["param_names"] = [names[p] for p in group["params"]]


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
