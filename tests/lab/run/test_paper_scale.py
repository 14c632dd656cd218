"""The paper's own settings, as far as this machine can go: building, a step, a checkpoint."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny_runs import trained

from eshampoo.lab.catalogue import WORKLOADS
from eshampoo.lab.errors import UserError
from eshampoo.lab.figures.paper import PAPER_FIGURES
from eshampoo.lab.figures.reproduce import plan
from eshampoo.lab.run import training


@dataclass(frozen=True)
class Noise:
    """Random images of the paper's size."""

    outputs: int = 10

    def __len__(self):
        return 8

    def batch(self, indices, generator):
        images = torch.randn(len(indices), 3, 224, 224, generator=generator)
        return images, torch.randint(self.outputs, (len(indices),), generator=generator)

    def validation(self):
        yield self.batch(torch.arange(1), torch.Generator().manual_seed(0))


@pytest.mark.slow
def test_a_run_of_the_paper_steps_saves_and_resumes(tmp_path, monkeypatch):
    """With two layers, as good as twelve of the same shapes, and two examples in a batch."""
    points = plan(PAPER_FIGURES["fig3"], "paper", 1, None)
    (run,) = (point.runs[0] for point in points if point.curve.label == "F = 50, τ = 0.1")
    run = replace(run, steps=2)
    paper = WORKLOADS["imagewoof-vit"].settings["paper"]
    small = replace(paper, model=partial(paper.model, depth=2), batch=2)
    monkeypatch.setattr(training, "setting", lambda run: small)

    def train(out, **keywords):
        training.train(run, Noise(), out, **keywords)
        return training.read_log(out / training.FILE_NAME)

    whole = train(tmp_path / "whole")
    training.train(run, Noise(), tmp_path / "parts", stopped=lambda: True)
    parts = train(tmp_path / "parts", resume=True)
    assert np.isfinite(whole.loss).all()
    assert len(whole.loss) == 2
    assert np.array_equal(parts.loss, whole.loss)


def test_a_device_that_is_not_there_is_told(tmp_path):
    run = WORKLOADS["digits-vit"].run("adamw", {}, scale="tiny", steps=1)
    with pytest.raises(UserError, match="--device cpu"):
        trained(run, tmp_path, device="no-such-device")
