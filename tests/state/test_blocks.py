"""Blocks that are moved together, and how many of them are worked on at a time."""

from types import SimpleNamespace

import pytest
import torch

from eshampoo import EShampoo
from eshampoo.state.blocks import blocks_at_once, runs


def blocks_of(shape, **options):
    """The blocks of the largest bucket of one parameter, and the parameter."""
    p = torch.arange(float(torch.Size(shape).numel())).view(shape).requires_grad_()
    options = {"max_dim": 4, "oversize": "split", **options}
    buckets = EShampoo([p], **options)._buckets
    return max((bucket.blocks for bucket in buckets), key=len), p


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((8, 12), {}),
        ((11, 10), {}),
        ((3, 8, 6), {"batch_dims": 1}),
        ((12, 8), {"pieces": 3}),
        ((18, 8), {"pieces": 3}),  # with gaps between the full blocks
        ((6, 4, 5), {"max_dim": 2}),
        ((8, 3, 5), {"max_dim": 16, "merge_dims": True}),
    ],
)
def test_joined_blocks_are_the_blocks_in_their_order(shape, options):
    blocks, p = blocks_of(shape, **options)
    for start in range(len(blocks)):
        for stop in range(start + 1, len(blocks) + 1):
            singles = torch.cat([block.of(p).flatten() for block in blocks[start:stop]])
            joined = runs(blocks[start:stop])
            assert torch.equal(torch.cat([run.of(p).flatten() for run in joined]), singles)
            assert [run.of(p).shape for run in joined] == [run.view_shape for run in joined]


def test_the_blocks_of_a_matrix_are_one_run_and_a_cut_through_its_rows_makes_three():
    blocks, _ = blocks_of((16, 20))
    assert len(blocks) == 20
    assert [run.counts for run in runs(blocks)] == [(4, 5)]
    assert [run.counts for run in runs(blocks[3:17])] == [(1, 2), (2, 5), (1, 2)]
    stacked, _ = blocks_of((7, 8, 8), batch_dims=1)
    assert [run.counts for run in runs(stacked)] == [(7, 2, 2)]


def test_a_part_takes_a_fixed_share_of_the_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert blocks_at_once(4 << 20, torch.device("cuda")) == 320
    assert blocks_at_once(4 << 20, torch.device("meta")) == 64
    assert blocks_at_once(80 << 30, torch.device("cuda")) == 1
