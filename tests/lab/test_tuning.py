"""Fine-tuning: a run starts from weights that were trained once, and LoRA leaves them alone."""

import made_data
import pytest
import torch
from tiny_runs import trained

from eshampoo.lab import tuning
from eshampoo.lab.catalogue import setting, workload
from eshampoo.lab.models.llama import Llama
from eshampoo.lab.models.lora import adapt_

SHAPE = tuning.TINY


def test_the_first_training_is_made_once_and_is_always_the_same(tmp_path, monkeypatch):
    load = workload("text-lora").settings["tiny"].data
    before = torch.get_rng_state()
    first = load(None)
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setenv("ESHAMPOO_CACHE", str(tmp_path / "another"))
    again = load(None)
    monkeypatch.setattr(tuning, "pretrained", lambda *_: pytest.fail("trained again"))
    cached = load(None)
    for name, value in first.weights.items():
        assert torch.equal(value, again.weights[name])
        assert torch.equal(value, cached.weights[name])
    torch.manual_seed(0)
    fresh = Llama(256, **SHAPE).state_dict()
    assert not torch.equal(fresh["head.weight"], first.weights["head.weight"])


def test_the_text_that_is_known_is_not_the_one_to_tune_on(tmp_path):
    made_data.wikitext_folder(tmp_path)
    (tmp_path / "tinyshakespeare.txt").write_text("To be, or not to be. " * 100)
    data = tuning.load_tuned(tmp_path, shape=SHAPE, steps=1, batch=2)
    assert bytes(data.train[:5].tolist()) == b"To be"
    assert data.outputs == 256


def test_adapters_start_as_the_model_was_and_only_they_are_trained():
    torch.manual_seed(0)
    model, tokens = Llama(256, **SHAPE), torch.arange(12).view(1, 12)
    before = model(tokens)
    adapt_(model, model.blocks, rank=2)
    assert torch.equal(model(tokens), before)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 7  # four matrices of attention and three of SwiGLU
    assert all(name.endswith((".down", ".up")) for name in trainable)
    model(tokens).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["text-tune", "text-lora"])
@pytest.mark.parametrize("optimizer", ["adamw", "eshampoo", "muon"])
def test_a_run_starts_from_the_weights_that_are_known(name, optimizer, tmp_path):
    run = workload(name).run(optimizer, {"lr": 1e-3}, scale="tiny", steps=3)
    log = trained(run, tmp_path / "run")
    assert log.header["setting"]["start"]["name"].startswith("with_")
    chosen = setting(run)
    data = chosen.data(None)
    model = chosen.start(chosen.model(data.outputs), data)
    weights = {k.replace(".linear", ""): v for k, v in model.state_dict().items()}
    assert all(torch.equal(weights[key], value) for key, value in data.weights.items())
