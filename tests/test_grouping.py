"""The helper that sorts a model's parameters by kind."""

import pytest
import torch
from torch import nn

from eshampoo import EShampoo, parameter_groups


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


def test_a_kind_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="norms") as error:
        parameter_groups(nn.Linear(2, 2), {"norms": {}})
    assert "embeddings" in str(error.value)


def test_a_model_without_linear_layers_has_no_head():
    assert set(names(parameter_groups(nn.Conv1d(2, 2, 1)))) == {"matrices", "vectors"}
