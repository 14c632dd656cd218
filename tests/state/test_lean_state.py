"""A lean state: what it keeps, how near it stays to a full one, and the way between the two."""

import copy

import pytest
import torch
from keyword_table import METHODS
from training import assert_same, feed, parameters, problem, run, through_a_file, trained

from benchmarks.shapes import MODELS
from eshampoo import EShampoo

SHAPES = [(4, 4), (4, 4), (6,), (3, 3, 3), (), (7, 5), (12, 9)]
OPTIONS = {
    "EShampoo": {"frequency": 3, "tau": 0.1, "max_dim": 5},
    "Shampoo": {"frequency": 3, "max_dim": 5},
    "SOAP": {"frequency": 3},
    "KLShampoo": {"frequency": 3, "max_dim": 5},
    "CASPR": {"frequency": 3, "max_dim": 5},
    "FullMatrixAdam": {"frequency": 3, "max_dim": 128},
}


def test_a_lean_state_has_triangles_and_fewer_bits():
    lean = EShampoo(parameters([torch.ones(12, 9), torch.ones(6)]), state="lean")
    matrix, vector = lean.state.values()
    names = ("exp_avg", "exp_avg_sq", "factor_0", "factor_1", "basis_0", "basis_1")
    assert {name: (tuple(matrix[name].shape), matrix[name].dtype) for name in names} == {
        "exp_avg": ((1, 12, 9), torch.bfloat16), "exp_avg_sq": ((1, 12, 9), torch.float32),
        "factor_0": ((1, 78), torch.float32), "factor_1": ((1, 45), torch.float32),
        "basis_0": ((1, 12, 12), torch.float16), "basis_1": ((1, 9, 9), torch.float16),
    }  # fmt: skip
    assert vector["exp_avg"].dtype == torch.float32  # without a basis it is torch's AdamW


@pytest.mark.parametrize(("sides", "full", "lean"), [("both", 30.5, 20), ("right", 18, 13)])
def test_a_lean_state_of_vit_s_takes_this_many_bytes_per_parameter(sides, full, lean):
    params = [torch.empty(shape, device="meta", requires_grad=True) for shape in MODELS["vit_s"]()]
    count = sum(p.numel() for p in params)
    for form, limit in (("full", full), ("lean", lean)):
        optimizer = EShampoo(params, sides=sides, state=form)
        stacks = [v for p in params for v in optimizer.state[p].values()]
        assert sum(v.numel() * v.element_size() for v in stacks) / count <= limit, form


@pytest.mark.parametrize("method", METHODS)
def test_in_float64_a_lean_state_stays_near_a_full_one(method):
    """There half the bits are float32, so that what is left is the arithmetic of triangles."""
    options = {**OPTIONS[method], "lr": 1e-2}
    _, full, _ = trained(method, SHAPES, 12, **options)
    _, lean, _ = trained(method, SHAPES, 12, state="lean", **options)
    for p, q in zip(full, lean, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)


def moves(method, grads, form, **options):
    """How far parameters go in float32, with a new basis at every step."""
    tensors, _ = problem([(24, 16), (12, 9)], 0)
    params = parameters(tensors, torch.float32)
    options = {"lr": 1e-2, "weight_decay": 0.0, "frequency": 1, "state": form, **options}
    run(METHODS[method](params, **options), params, grads)
    return [p.detach() - W.float() for p, W in zip(params, tensors, strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_in_float32_lean_steps_are_within_two_percent_of_full_ones(method):
    _, grads = problem([(24, 16), (12, 9)], 12)
    limit = 0.3 if method == "FullMatrixAdam" else 0.02  # whose factors lack rank
    forms = [moves(method, grads, form, frequency=2) for form in ("full", "lean")]
    for full, lean in zip(*forms, strict=True):
        assert (full - lean).norm() <= limit * full.norm()


@pytest.mark.parametrize("method", ["EShampoo", "SOAP", "Shampoo", "CASPR", "KLShampoo"])
def test_what_leaks_out_of_a_gradient_of_low_rank_moves_little(method):
    """A basis in float16 lets some of it show in the slots of the null space."""
    _, grads = problem([(24, 16), (12, 9)], 12)
    columns, _ = problem([(24, 1), (12, 1)], 0, seed=1)
    inside = [column @ column.T for column in columns]
    grads = [[P @ G for P, G in zip(inside, step, strict=True)] for step in grads]
    pairs = zip(moves(method, grads, "full"), moves(method, grads, "lean"), strict=True)
    for full, lean in pairs:
        assert (full - lean).norm() <= 0.2 * full.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_a_lean_run_resumes_bit_for_bit(method, dtype):
    options = {**OPTIONS[method], "state": "lean"}
    optimizer, params, grads = trained(method, SHAPES, 7, dtype=dtype, **options)
    weights = copy.deepcopy(params)
    resumed = METHODS[method](weights, **options)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    run(optimizer, params, grads)
    run(resumed, weights, grads)
    for p, q in zip(params, weights, strict=True):
        assert torch.equal(p.detach(), q.detach())
        assert_same(optimizer.state[p], resumed.state[q])


def test_a_lean_state_continues_only_in_a_lean_one():
    full, params, _ = trained("EShampoo", SHAPES, 3, **OPTIONS["EShampoo"])
    lean = METHODS["EShampoo"](copy.deepcopy(params), state="lean", **OPTIONS["EShampoo"])
    with pytest.raises(ValueError, match="state is 'full' now but was 'lean'"):
        lean.load_state_dict(through_a_file(full.state_dict()))


def test_a_running_optimizer_does_not_change_the_form_of_its_state():
    optimizer, params, grads = trained("EShampoo", SHAPES, 3, state="lean")
    optimizer.param_groups[0]["state"] = "full"
    feed(params, grads[0])
    with pytest.raises(ValueError, match="state is 'full' now but was 'lean'"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:the gradient of")
@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_a_skipped_block_of_a_lean_state_keeps_every_bit(method):
    options = {**OPTIONS[method], "frequency": 2, "state": "lean"}
    optimizer, params, grads = trained(method, SHAPES, 5, dtype=torch.float32, **options)
    for step in grads:
        before = {k: v.clone() for k, v in optimizer.state[params[0]].items() if k != "skipped"}
        weights = params[0].detach().clone()
        bad = step[0].clone()
        bad[1, 1] = torch.nan
        run(optimizer, params, [[bad, *step[1:]]])
        found = {k: v for k, v in optimizer.state[params[0]].items() if k != "skipped"}
        assert_same(before, found)
        assert torch.equal(weights, params[0])


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["eigh", "qr", "power", "partial"])
def test_a_lean_basis_stays_orthogonal(solver):
    options = {"solver": solver, "tau": 0.0, "frequency": 1, "budget": None, "state": "lean"}
    tensors, grads = problem([(24, 16)], 150)
    params = parameters(tensors, torch.float32)
    optimizer = EShampoo(params, **options)
    run(optimizer, params, grads)
    assert optimizer.basis_computations == 300
    for mode in (0, 1):
        Q = optimizer.state[params[0]][f"basis_{mode}"][0].float()
        assert torch.linalg.matrix_norm(Q.T @ Q - torch.eye(len(Q)), 2) < 1e-3


def test_an_adamw_state_continues_in_a_lean_one():
    tensors, grads = problem([(8, 6), (6,)], 6)
    params = parameters(tensors, torch.float32)
    adamw = torch.optim.AdamW(params)
    run(adamw, params, grads)
    optimizer = EShampoo(params, state="lean", frequency=10)
    optimizer.load_state_dict(adamw.state_dict())
    expected = adamw.state[params[0]]["exp_avg"].bfloat16()
    assert torch.equal(optimizer.state[params[0]]["exp_avg"][0], expected)
