"""What a basis on one side saves: a plain step and the state against those of both sides.

python -m benchmarks.one_side [--shapes vit_s] [--side right] [--threads 1]
"""

import argparse

import torch

from eshampoo import EShampoo

from . import shapes, timing

BAR = 0.6  # of both, each


def main() -> None:
    """Print the two ratios."""
    parser = argparse.ArgumentParser(description="What a basis on one side saves")
    parser.add_argument("--shapes", default="vit_s", choices=shapes.MODELS)
    parser.add_argument("--side", default="right", choices=("left", "right", "smaller"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    optimizers = {
        side: EShampoo(shapes.parameters(options.shapes), sides=side, frequency=10**9)
        for side in ("both", options.side)
    }
    for optimizer in optimizers.values():
        optimizer.step()
    steps = {side: optimizer.step for side, optimizer in optimizers.items()}
    times = timing.race(steps, options.repetitions, budget=120.0)
    size = {side: timing.state_bytes(o.state, o.state) for side, o in optimizers.items()}
    seconds = {side: found["least"] for side, found in times.items()}
    print(f"{options.shapes}, {options.threads} thread(s), bar {BAR}")
    for what, of in (("plain step, seconds", seconds), ("state, bytes", size)):
        ratio = of[options.side] / of["both"]
        print(f"  {what}: {of[options.side]:.4g} / {of['both']:.4g} = {ratio:.2f}")


if __name__ == "__main__":
    main()
