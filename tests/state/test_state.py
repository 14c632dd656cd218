"""What is kept for a parameter: its names, shapes and precision."""

import pytest
import torch
from keyword_table import METHODS
from training import assert_close, parameters, problem, run, through_a_file, trained

from eshampoo import EShampoo

SHAPES = [(4, 4), (3, 3, 3), (5,), ()]


def test_state_is_there_before_the_first_step_and_keyed_by_parameter():
    tensors, _ = problem([*SHAPES, (7, 5), (0, 3)], 0)
    params = parameters(tensors)
    for method in METHODS:
        max_dim = 64 if method == "FullMatrixAdam" else 5
        optimizer = METHODS[method](params, frequency=3, max_dim=max_dim)
        keys = {p: set(optimizer.state[p]) for p in params if p.numel()}
        assert all({"step", "exp_avg"} <= names for names in keys.values())
        run(optimizer, params, [[torch.ones_like(p) for p in params]])
        assert {p: set(optimizer.state[p]) for p in params if p.numel()} == keys
        assert all(isinstance(p, torch.Tensor) for p in optimizer.state)


def test_the_entries_of_ragged_blocks_have_numbered_names():
    optimizer = EShampoo(parameters([torch.ones(40, 24)]), max_dim=16, merge_dims=False)
    (state,) = optimizer.state.values()
    shapes = {key: tuple(v.shape) for key, v in state.items() if key.startswith("exp_avg")}
    shapes = {key: shape for key, shape in shapes.items() if "sq" not in key}
    assert shapes == {
        "exp_avg": (2, 16, 16), "exp_avg.1": (2, 16, 8), "exp_avg.2": (1, 8, 16),
        "exp_avg.3": (1, 8, 8),
    }  # fmt: skip


def test_state_keeps_its_precision_whatever_the_parameter_has():
    for dtype, state in [
        (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
        (torch.float32, torch.float32), (torch.float64, torch.float64),
    ]:  # fmt: skip
        optimizer, *_ = trained("EShampoo", [(4, 4), (3,)], 3, dtype=dtype)
        saved = through_a_file(optimizer.state_dict())["state"]
        for values in saved.values():
            assert values["exp_avg"].dtype == values["exp_avg_sq"].dtype == state
        assert saved[0]["factor_0"].dtype == saved[0]["basis_0"].dtype == state
        assert saved[0]["basis_checks"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_half_precision_parameters_keep_float32_state_and_stay_near_float32(method, dtype):
    optimizer, params, _ = trained(method, SHAPES, 8, dtype=dtype, frequency=3, lr=1e-2)
    _, exact, _ = trained(method, SHAPES, 8, dtype=torch.float32, frequency=3, lr=1e-2)
    for p, q in zip(params, exact, strict=True):
        assert p.dtype == dtype
        floating = [v for v in optimizer.state[p].values() if v.is_floating_point()]
        assert {v.dtype for v in floating} <= {torch.float32, torch.float64}
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert_close(p.detach().float(), q.detach(), 0.1)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, 24 + 24 + 2 * (16 + 36)),
        ({"moment": "row"}, 24 + 4 + 2 * (16 + 36)),
        ({"moment": "block"}, 24 + 1 + 2 * (16 + 36)),
        ({"sides": "left"}, 24 + 24 + 2 * 16),
        ({"sides": "right"}, 24 + 24 + 2 * 36),
        ({"sides": "smaller", "moment": "block"}, 24 + 1 + 2 * 16),
    ],
)
def test_the_state_of_a_matrix_has_so_many_numbers(options, numbers):
    p = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = METHODS["EShampoo"]([p], merge_dims=False, **options)
    kept = {n: v for n, v in optimizer.state[p].items() if v.dim() > 2}
    assert sum(v.numel() for v in kept.values()) == numbers


def test_rows_of_a_block_with_one_mode_are_refused():
    p = torch.nn.Parameter(torch.ones(4, 6))
    with pytest.raises(ValueError, match=r"moment='row'.*one mode.*merge_dims=False"):
        METHODS["EShampoo"]([("W", p)], merge_dims=True, moment="row")


def test_the_state_of_adamw_continues_in_means():
    p, q = (torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2))
    adamw = torch.optim.AdamW([p])
    p.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    adamw.step()
    ours = METHODS["EShampoo"]([q], merge_dims=False, moment="row")
    ours.load_state_dict(adamw.state_dict())
    expected = adamw.state[p]["exp_avg_sq"].mean(1)
    torch.testing.assert_close(ours.state[q]["exp_avg_sq"].flatten(), expected)
