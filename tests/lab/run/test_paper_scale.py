"""The paper's own settings, as far as this machine can go: building, a step, a checkpoint."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from tiny_runs import trained

from eshampoo.lab.catalogue import WORKLOADS
from eshampoo.lab.errors import UserError
from eshampoo.lab.figures.appendix import APPENDIX
from eshampoo.lab.figures.catalogue import PAPERS
from eshampoo.lab.figures.reproduce import plan
from eshampoo.lab.run import training


@dataclass(frozen=True)
class Made:
    """Random examples of the shapes of a data set."""

    outputs: int
    example: torch.Tensor
    targets: tuple[int, ...]

    def __len__(self):
        return 8

    def batch(self, indices, generator):
        targets = torch.randint(self.outputs, (len(indices), *self.targets), generator=generator)
        if self.example.dtype == torch.int64:
            return targets, targets
        shape = (len(indices), *self.example.shape)
        return torch.randn(shape, generator=generator), targets

    def validation(self):
        yield self.batch(torch.arange(1), torch.Generator().manual_seed(0))


# Two layers of the ViT, as good as twelve of the same shapes. Of the Llama one layer and a small
# vocabulary; the whole of it takes more memory than there is.
REDUCED = {
    "imagewoof-vit": ({"depth": 2}, Made(10, torch.zeros(3, 224, 224), ())),
    "text-llama": (
        {"depth": 1, "length": 32},
        Made(512, torch.zeros(32, dtype=torch.int64), (32,)),
    ),
}


def at_paper_scale(figure, workload, label):
    """The run of a figure's curve with the paper's own options, two steps long."""
    points = plan(figure, "paper", 1, None)
    found = [p.runs[0] for p in points if p.curve.label == label]
    return replace(next(run for run in found if run.workload == workload), steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("figure", "workload", "label"),
    [
        (PAPERS["fig3"], "imagewoof-vit", "F = 50, τ = 0.1"),
        (APPENDIX["patterns-llama"], "text-llama", "EShampoo"),
    ],
    ids=["vit", "llama"],
)
def test_a_run_of_the_paper_steps_saves_and_resumes(figure, workload, label, tmp_path, monkeypatch):
    """With two examples in a batch; bits are the same with and without an interruption."""
    reduced, dataset = REDUCED[workload]
    run = at_paper_scale(figure, workload, label)
    # a basis at every step would take minutes; they are computed at the paper's first check
    run = replace(run, options={**run.options, "frequency": 50})
    row = WORKLOADS[workload]
    paper = row.settings["paper"]
    small = replace(paper, model=partial(paper.model, **reduced), batch=2)
    monkeypatch.setattr(training, "setting", lambda run: small)
    monkeypatch.setattr(training, "workload", lambda name: row)

    def train(out, **keywords):
        out.mkdir(exist_ok=True)
        training.train(run, dataset, out, **keywords)
        return training.read_log(out / training.FILE_NAME)

    whole = train(tmp_path / "whole")
    train(tmp_path / "parts", stopped=lambda: True)
    parts = train(tmp_path / "parts", resume=True)
    assert np.isfinite(whole.loss).all()
    assert len(whole.loss) == 2
    assert np.array_equal(parts.loss, whole.loss)


def test_a_device_that_is_not_there_is_told(tmp_path):
    run = WORKLOADS["digits-vit"].run("adamw", {}, scale="tiny", steps=1)
    with pytest.raises(UserError, match="--device cpu"):
        trained(run, tmp_path, device="no-such-device")
