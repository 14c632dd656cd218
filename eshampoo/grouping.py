"""Sort a model's parameters into ordinary param groups, and name an optimizer's parameters."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .report import as_table

KINDS = ("matrices", "vectors", "embeddings", "head")
# Why a parameter is of a kind, the first that holds; a head has a reason of its own.
WHY = {
    "frozen": "left out",
    "embeddings": "the weight of an embedding",
    "vectors": "fewer than two dimensions",
    "head": "",
    "matrices": "none of the others",
}
# What the layer that makes the outputs is often called.
HEADS = {"head", "lm_head", "classifier", "fc", "output", "score", "logits", "unembed"}
# What `sides` is for a weight that is stored the other way round.
MIRRORED = {"left": "right", "right": "left"}


class ParameterGroups(list[dict[str, Any]]):
    """Param groups: a list that prints as a table of what went where, and why."""

    rows: Sequence[Sequence[str]] = ()

    def __str__(self) -> str:
        return as_table(zip(("parameter", "shape", "group", "why"), *self.rows, strict=True))


def parameter_groups(
    model: nn.Module,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    head: str | Sequence[str] | None = None,
) -> ParameterGroups:
    """Sort a model's parameters into groups: matrices, vectors, embeddings and output head.

    Each group has the key "kind" and named parameters. A kind without parameters has no group, and
    frozen parameters are left out. A parameter of several kinds, such as an output head tied to an
    embedding, goes to the first of embeddings, vectors, head and matrices.

    Args:
        model: any module.
        options: the hyperparameters of each group, by kind. `sides` means those of `nn.Linear`: for
            weights that are stored as [inputs, outputs] (Conv1D of transformers), it is mirrored.
        head: name or names of the modules that make the outputs, () for none. By default it is the
            `nn.Linear` that is tied to an embedding, comes last in an `nn.Sequential`, has a usual
            name, or has outputs that no other layer takes. You must choose between several.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
        >>> print(parameter_groups(model, {"embeddings": {"matrices": "adam"}}))
        parameter  shape  group       why
        0.weight   50×8   embeddings  the weight of an embedding
        1.weight   8×8    matrices    none of the others
        1.bias     8      vectors     fewer than two dimensions
        2.weight   50×8   head        2 comes last
        2.bias     50     vectors     fewer than two dimensions
    """
    options = options or {}
    for kind in options.keys() - {*KINDS}:
        raise ValueError(f"options for {kind!r}: use one of the kinds, {', '.join(KINDS)}")
    modules = dict(model.named_modules())
    embeddings = {
        m.weight for m in modules.values() if isinstance(m, nn.Embedding | nn.EmbeddingBag)
    }
    transposed = {m.weight for m in modules.values() if type(m).__name__ == "Conv1D"}
    heads, rows, groups = _outputs(modules, embeddings, head), [], dict[tuple[str, str], Any]()
    for name, p in model.named_parameters():
        holds = (not p.requires_grad, p in embeddings, p.dim() < 2, p in heads, True)
        kind, why = next(compress(WHY.items(), holds))
        why = (why or heads[p]) + (", stored as inputs × outputs" if p in transposed else "")
        rows.append((name, "×".join(map(str, p.shape)), kind, why))
        own = {"params": [], "kind": kind, **options.get(kind, {})}
        if p in transposed and own.get("sides") in MIRRORED:
            own["sides"] = MIRRORED[own["sides"]]
        groups.setdefault((kind, own.get("sides", "")), own)["params"].append((name, p))
    found = ParameterGroups(g for kind in KINDS for g in groups.values() if g["kind"] == kind)
    found.rows = rows
    return found


def _outputs(
    modules: Mapping[str, nn.Module], embeddings: set[Tensor], chosen: str | Sequence[str] | None
) -> dict[Tensor, str]:
    """The parameters of the layers that make the outputs, and how these are known."""
    linear = {name: m for name, m in modules.items() if isinstance(m, nn.Linear)}
    taken, last = {m.in_features for m in linear.values()}, next(reversed(linear), "")
    place, dot, _ = last.rpartition(".")
    in_order = isinstance(modules[place], nn.Sequential)
    in_order = in_order and all(name.startswith(place + dot) for name in linear)
    rules: dict[str, Callable[[str, nn.Linear], bool]] = {
        "is tied to an embedding": lambda _, m: m.weight in embeddings,
        "comes last": lambda name, _: in_order and name == last,
        "has the name of a head": lambda name, _: name.rpartition(".")[2] in HEADS,
        "has outputs that no layer takes": lambda _, m: all(m.out_features % d for d in taken),
        "is the only Linear": lambda *_: True,
    }
    found, how = [chosen] if isinstance(chosen, str) else [*(chosen or ())], "was chosen"
    for rule, holds in rules.items():
        if chosen is None and not found:
            found, how = [name for name, m in linear.items() if holds(name, m)], rule
    if {*found} - modules.keys() or (chosen is None and len(found) > 1):
        raise ValueError(
            f"head={chosen!r} does not say which of {', '.join(modules if chosen else found)} "
            "makes the outputs: pass its name, several names, or () if there is none"
        )
    return {p: f"{name} {how}" for name in found for p in modules[name].parameters()}


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
    for index, group in enumerate(optimizer.param_groups):
        for number, p in enumerate(group["params"]):
            if p not in names:
                raise ValueError(
                    f"parameter {number} of group {index}, of shape {tuple(p.shape)}, is not in "
                    "the model: pass the one that is trained, as it is after wrapping or sharding"
                )
    for group in optimizer.param_groups:
        group["param_names"] = [names[p] for p in group["params"]]
