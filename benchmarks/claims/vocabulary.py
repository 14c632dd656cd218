"""What a vocabulary costs: bytes of state, time of a step, and the loss without its basis.

    python -m benchmarks.claims.vocabulary [--shape 50257 256] [--data PATH] [--steps 120]

One embedding, AdamW and EShampoo in turn on one thread: medians of CPU seconds of a plain step. The
bare products are the three that a basis on one side needs. With --data, a Llama with 8,192 tokens
is trained twice on that text: once as it is, and once with AdamW for its embedding and head.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch.optim import AdamW

from eshampoo import EShampoo
from eshampoo.grouping import parameter_groups
from eshampoo.lab.catalogue import workload
from eshampoo.lab.data import batch_indices, seeded, text

from .. import environment, timing
from ..command import command_line
from ..contenders import NEVER
from ..states import state_bytes

VOCABULARY = 8192
RATE, DECAY = 3e-3, 0.1


def embedding(shape: Sequence[int]) -> torch.nn.Parameter:
    """An embedding with a gradient in every row, as if it were tied to the head."""
    p = torch.nn.Parameter(torch.randn(*shape))
    p.grad = torch.randn_like(p)
    return p


def final_loss(data: Path, steps: int, seed: int, with_adam: bool) -> float:
    """The mean training loss of the last 5 % of the steps, at a constant rate after warm-up."""
    row = workload("text-llama")
    small = row.settings["small"]
    dataset = text.load_text(row.locate(data), vocabulary=VOCABULARY, length=128)
    torch.manual_seed(seed)
    model = small.model(dataset.outputs)
    kinds = ("embeddings", "head") if with_adam else ()
    groups = parameter_groups(model, {kind: {"matrices": "adam"} for kind in kinds})
    optimizer = EShampoo(groups, lr=RATE, weight_decay=DECAY)
    losses = []
    for step in range(steps):
        indices = batch_indices(len(dataset), small.batch, seed, step)
        loss = row.loss(model, dataset.batch(indices, seeded(seed, step, 1)))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / (0.05 * steps))
        optimizer.step()
        losses.append(loss.item())
    return fmean(losses[-max(1, steps // 20) :])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print bytes and ratios; with --data also the losses."""
    parser = command_line("claims.vocabulary", __doc__)
    parser.add_argument("--shape", type=int, nargs=2, default=[50257, 256])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=2)
    o = parser.parse_args(arguments)
    timing.use_threads(1)
    timing.warm_up()
    adamw = AdamW([embedding(o.shape)])
    ours = EShampoo([embedding(o.shape)], frequency=NEVER)
    X, Q = torch.randn(*o.shape), torch.randn(o.shape[1], o.shape[1])
    rotated, factor = torch.empty_like(X), torch.empty_like(Q)

    def products() -> None:
        torch.mm(X, Q, out=rotated)
        torch.mm(X.t(), X, out=factor)
        torch.mm(X, Q, out=rotated)

    for _ in range(2):  # the first step has more to do
        ours.step()
        adamw.step()
    actions: dict[str, timing.Action] = {
        "AdamW": adamw.step,
        "EShampoo": ours.step,
        "bare products": products,
    }
    seconds = {k: v["cpu"] for k, v in timing.race(actions, o.repetitions, budget=240.0).items()}
    print(f"{o.shape[0]} × {o.shape[1]}, one thread, {environment.cpu_model()}")
    print(f"bytes per parameter: {state_bytes(ours) / X.numel():.2f}")
    for name, value in seconds.items():
        print(f"{name}: {value:.3g} CPU s, {value / seconds['AdamW']:.2f} of AdamW's step")
    if o.data is None:
        return
    for with_adam in (False, True):
        run = partial(final_loss, o.data, o.steps, with_adam=with_adam)
        losses = ", ".join(f"{run(seed=seed):.3f}" for seed in range(o.seeds))
        how = "with AdamW for embedding and head" if with_adam else "as it is"
        print(f"final loss {how}: {losses}", flush=True)


if __name__ == "__main__":
    main()
