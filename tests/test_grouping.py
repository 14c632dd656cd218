"""The functions that sort a model's parameters by kind and name those in groups."""

import pytest
import torch
from torch import nn

from eshampoo import EShampoo, name_parameters, parameter_groups


class Tied(nn.Module):
    """An output head that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.norm(self.hidden(self.embedding(tokens))))


def names(groups):
    return {group["kind"]: [name for name, _ in group["params"]] for group in groups}


def test_parameters_are_sorted_by_kind_and_each_is_there_once():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Conv1d(4, 4, 3), nn.LayerNorm(4), nn.Linear(4, 9))
    groups = parameter_groups(model)
    assert names(groups) == {
        "matrices": ["1.weight"],
        "vectors": ["1.bias", "2.weight", "2.bias", "3.bias"],
        "embeddings": ["0.weight"],
        "head": ["3.weight"],
    }
    listed = [p for group in groups for _, p in group["params"]]
    assert len(listed) == len(set(listed)) == len(list(model.parameters()))


def test_a_head_tied_to_an_embedding_is_an_embedding():
    groups = names(parameter_groups(Tied()))
    assert groups["embeddings"] == ["embedding.weight"]
    assert "head" not in groups
    assert groups["matrices"] == ["conv.weight", "hidden.weight"]


def test_options_go_to_their_kind_and_the_optimizer_takes_the_groups():
    model = Tied()
    groups = parameter_groups(
        model, {"embeddings": {"matrices": "adam", "lr": 0.5}, "vectors": {"weight_decay": 0.0}}
    )
    optimizer = EShampoo(groups, lr=1e-2)
    by_kind = {group["kind"]: group for group in optimizer.param_groups}
    assert (by_kind["embeddings"]["lr"], by_kind["embeddings"]["matrices"]) == (0.5, "adam")
    assert (by_kind["vectors"]["lr"], by_kind["vectors"]["weight_decay"]) == (1e-2, 0.0)
    assert {r.name for r in optimizer.basis_report()} == {"conv.weight", "hidden.weight"}
    model(torch.arange(5)).square().mean().backward()
    before = model.embedding.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model.embedding.weight.detach())


def test_the_head_can_be_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert names(parameter_groups(model))["head"] == ["1.weight"]
    assert names(parameter_groups(model, head="0"))["head"] == ["0.weight"]
    with pytest.raises(ValueError, match="head='5'"):
        parameter_groups(model, head="5")


class Model(nn.Module):
    """Layers that are not in the order of their use; nothing but their names and shapes tells."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


HEADS = {
    "by its name, though it is defined first": (
        lambda: Model(head=nn.Linear(8, 8), body=nn.Linear(8, 8)),
        ("head", "has the name of a head"),
    ),
    "by its outputs, though it is defined first": (
        lambda: Model(last=nn.Linear(8, 10), qkv=nn.Linear(8, 24), out=nn.Linear(8, 8)),
        ("last", "has outputs that no layer takes"),
    ),
    "by its place": (
        lambda: Model(net=nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))),
        ("net.2", "comes last"),
    ),
    "alone": (lambda: Model(conv=nn.Conv1d(2, 2, 1), a=nn.Linear(2, 2)), ("a", "is the only")),
}


@pytest.mark.parametrize(("model", "expected"), HEADS.values(), ids=HEADS)
def test_the_head_is_found(model, expected):
    layer, why = expected
    groups = parameter_groups(model())
    assert names(groups)["head"] == [f"{layer}.weight"]
    assert f"head      {layer} {why}" in str(groups)


def test_it_does_not_guess_between_heads():
    model = Model(actor=nn.Linear(8, 3), critic=nn.Linear(8, 1), body=nn.Linear(8, 8))
    with pytest.raises(ValueError, match="which of actor, critic makes the outputs: pass its name"):
        parameter_groups(model)
    assert names(parameter_groups(model, head=["actor", "critic"]))["head"] == [
        "actor.weight",
        "critic.weight",
    ]
    assert "head" not in names(parameter_groups(model, head=()))


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    groups = parameter_groups(model)
    assert names(groups) == {"vectors": ["1.bias"], "head": ["1.weight"]}
    assert "0.weight   3×3    frozen   left out" in str(groups)


def test_sides_mean_the_same_for_weights_that_are_stored_the_other_way_round():
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    theirs, ours = pytorch_utils.Conv1D(6, 4), nn.Linear(4, 6)  # both have 4 inputs
    model = Model(theirs=theirs, ours=ours)
    groups = parameter_groups(model, {"matrices": {"sides": "right", "lr": 0.5}}, head=())
    assert "stored as inputs × outputs" in str(groups)
    optimizer = EShampoo(groups)
    assert {(row.name, row.size) for row in optimizer.basis_report()} == {
        ("theirs.weight", 4),
        ("ours.weight", 4),
    }
    lrs = [group["lr"] for group in optimizer.param_groups if group["kind"] == "matrices"]
    assert lrs == [0.5, 0.5]
    assert len(parameter_groups(model, {"matrices": {"sides": "both"}}, head=())) == 2


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="norms") as error:
        parameter_groups(nn.Linear(2, 2), {"norms": {}})
    assert "embeddings" in str(error.value)


def test_a_model_without_linear_layers_has_no_head():
    assert set(names(parameter_groups(nn.Conv1d(2, 2, 1)))) == {"matrices", "vectors"}


def by_decay(model):
    """Groups of bare parameters, as frameworks make them."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def test_names_are_those_that_named_parameters_would_have_given():
    model = Tied()
    optimizer, named = EShampoo(model.parameters()), EShampoo(model.named_parameters())
    name_parameters(optimizer, model)
    assert optimizer.param_groups[0]["param_names"] == named.param_groups[0]["param_names"]
    assert [r.name for r in optimizer.basis_report()] == [r.name for r in named.basis_report()]


def test_every_group_of_a_framework_gets_its_names_and_keeps_its_training():
    model, twin = Tied(), Tied()
    twin.load_state_dict(model.state_dict())
    named, bare = (EShampoo(by_decay(m), lr=1e-2, frequency=1) for m in (model, twin))
    name_parameters(named, model)
    assert [group["param_names"] for group in named.param_groups] == [
        ["embedding.weight", "conv.weight", "hidden.weight"],
        ["conv.bias", "norm.weight", "norm.bias", "hidden.bias", "head.bias"],
    ]
    for _ in range(3):
        for net, optimizer in ((model, named), (twin, bare)):
            optimizer.zero_grad()
            net(torch.arange(5)).square().mean().backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    assert {r.name for r in named.basis_report()} == {
        "embedding.weight", "conv.weight", "hidden.weight"
    }  # fmt: skip


def test_names_survive_saving_and_a_state_without_names_loads():
    model = Tied()
    named, bare = EShampoo(model.parameters()), EShampoo(model.parameters())
    unnamed = bare.state_dict()
    name_parameters(named, model)
    bare.load_state_dict(named.state_dict())
    assert bare.param_groups[0]["param_names"] == named.param_groups[0]["param_names"]
    named.load_state_dict(unnamed)
    assert named.basis_report()[0].name == "embedding.weight"


def test_a_parameter_that_the_model_does_not_have_is_refused_and_nothing_is_written():
    model, other = nn.Linear(3, 2), nn.Linear(5, 4)
    optimizer = EShampoo([{"params": model.parameters()}, {"params": other.parameters()}])
    with pytest.raises(ValueError, match=r"parameter 0 of group 1, of shape \(4, 5\), is not"):
        name_parameters(optimizer, model)
    assert not any("param_names" in group for group in optimizer.param_groups)
