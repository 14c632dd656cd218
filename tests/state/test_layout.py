"""Which sides of a parameter have a basis, and the blocks that it is cut into."""

import pytest
import torch
from beside_oracles import compare
from keyword_table import choices
from training import assert_close, parameters, problem, run

import eshampoo
from eshampoo import EShampoo
from eshampoo.classes import EShampooKeywords
from eshampoo.options import Options, offered
from eshampoo.sides import MAX_ASPECT, every_side


def sides(shape, **options):
    """Shape of the blocks and modes with a basis."""
    joined, modes = every_side(shape, Options.of(options, offered(EShampooKeywords)))
    return [[shape[dim] for dim in dims] for dims in joined], modes


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((6, 4), {}, ([[6], [4]], (0, 1))),
        ((6, 4), {"merge_dims": True, "max_dim": 24}, ([[6, 4]], (0,))),
        ((8, 4, 3, 3), {}, ([[8], [4], [3], [3]], (0, 1, 2, 3))),
        ((8, 4, 3, 3), {"merge_dims": "kernel"}, ([[8], [4, 3, 3]], (0, 1))),
        ((8, 4), {"merge_dims": "kernel"}, ([[8], [4]], (0, 1))),
        (
            (8, 4, 9, 9),
            {"merge_dims": "kernel", "max_dim": 64},
            ([[8], [4], [9], [9]], (0, 1, 2, 3)),
        ),
        # A depthwise convolution has one input: the rest of its kernel joins the first of it.
        ((64, 1, 3, 3), {"merge_dims": "kernel"}, ([[64], [3, 3]], (0, 1))),
        ((1, 8, 1, 1), {"vectors": "full"}, ([[8]], (0,))),
    ],
)
def test_the_sides_of_a_parameter(shape, options, expected):
    assert sides(shape, **{"merge_dims": False, **options}) == expected


def test_a_parameter_with_one_dimension_above_one_is_a_vector():
    params = parameters([torch.ones(1, 8, 1, 1), torch.ones(8, 1), torch.ones(8)])
    optimizer = EShampoo(params, merge_dims=False)
    assert all("basis_0" not in optimizer.state[p] for p in params)
    optimizer = EShampoo(params, merge_dims=False, vectors="full", matrices="adam")
    assert all("basis_0" in optimizer.state[p] for p in params)


def test_a_skinny_matrix_has_a_basis_on_its_small_side_alone():
    wide = MAX_ASPECT * 4
    assert sides((4, wide - 1))[1] == (0, 1)
    assert sides((4, wide))[1] == (0,)
    assert sides((wide, 4))[1] == (1,)
    # LoRA: what would be cut at max_dim stays whole where it has no basis.
    (p,) = parameters([torch.ones(8, 4096)])
    state = EShampoo([p], merge_dims=False).state[p]
    assert {name: tuple(state[name].shape) for name in ("exp_avg", "factor_0")} == {
        "exp_avg": (1, 8, 4096),
        "factor_0": (1, 8, 8),
    }
    tensors = [v for name, v in state.items() if not name.startswith(("basis_c", "basis_w"))]
    assert sum(v.numel() * v.element_size() for v in tensors) / p.numel() < 8.1


@pytest.mark.parametrize("frequency", [1, 5])
def test_skinny_matrices_follow_the_oracle(frequency):
    shapes = [(2, 40), (40, 2)]
    compare("EShampoo", shapes, 12, frequency=frequency, tau=0.0, merge_dims=False)


def test_one_side_of_a_block_can_have_the_only_basis():
    asked = {side: sides((4, 6), merge_dims=False, sides=side)[1] for side in choices("sides")}
    assert asked == {"both": (0, 1), "left": (0,), "right": (1,), "smaller": (0,)}
    assert sides((4, 3, 5), merge_dims=False, sides="smaller")[1] == (1,)
    assert sides((4, 4), merge_dims=False, sides="smaller")[1] == (1,)
    # A side that is too large for a basis gets none in this way either.
    assert sides((4, 16 * 5), merge_dims=False, sides="right")[1] == ()


# Blocks -------------------------------------------------------------------------------------------


def test_the_blocks_of_a_parameter_are_parameters_of_their_own():
    tensors, grads = problem([(7, 5)], 12)
    cuts = [(slice(a, a + 3), slice(b, b + 3)) for a in (0, 3, 6) for b in (0, 3)]
    options = {"frequency": 4, "tau": 0.0, "max_dim": 3, "merge_dims": False, "vectors": "full"}
    whole, pieces = parameters(tensors), parameters([tensors[0][cut] for cut in cuts])
    run(EShampoo(whole, **options), whole, grads)
    run(EShampoo(pieces, **options), pieces, [[G[cut] for cut in cuts] for (G,) in grads])
    for cut, piece in zip(cuts, pieces, strict=True):
        assert_close(whole[0].detach()[cut], piece.detach(), 1e-12)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((40, 24), {"max_dim": 16}),
        ((5, 4, 3, 3), {"max_dim": 4}),
        ((5, 4, 3, 3), {"max_dim": 12, "merge_dims": True}),
        ((1, 33), {"max_dim": 16}),
        ((9, 1, 9), {"max_dim": 4, "oversize": "identity"}),
    ],
)
def test_blocks_round_trip_exactly(shape, options):
    """Before the first basis the update is elementwise, so any misplaced entry would show."""
    tensors, grads = problem([shape], 3)
    blocked, plain = parameters(tensors), parameters(tensors)
    run(EShampoo(blocked, frequency=50, **options), blocked, grads)
    run(EShampoo(plain, matrices="adam", vectors="adam"), plain, grads)
    assert torch.equal(blocked[0].detach(), plain[0].detach())


def test_a_vocabulary_has_a_basis_on_its_other_side_alone_and_is_not_cut():
    embedding, head = (torch.empty(shape, device="meta") for shape in ((50257, 256), (256, 50257)))
    optimizer = EShampoo([p.requires_grad_() for p in (embedding, head)])
    for p, mode in ((embedding, 1), (head, 0)):
        state = optimizer.state[p]
        assert state["exp_avg"].shape == (1, *p.shape)
        assert [name for name in state if name.startswith("factor")] == [f"factor_{mode}"]
        assert sum(v.numel() * v.element_size() for v in state.values()) <= 12 * p.numel()


# Several matrices in one parameter ----------------------------------------------------------------

SEPARATE = {
    "EShampoo": ("EShampoo", {"frequency": 3}),
    "EShampoo in blocks": ("EShampoo", {"frequency": 3, "max_dim": 4, "factors": "kl"}),
    "Shampoo with a graft": ("Shampoo", {"frequency": 3, "max_dim": 4}),
    "SOAP": ("SOAP", {"frequency": 3}),
    "KL-Shampoo": ("KLShampoo", {"frequency": 3}),
    "CASPR": ("CASPR", {"frequency": 3}),
    "full matrices": ("FullMatrixAdam", {"frequency": 30}),
    "Muon": ("Muon", {}),
}


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 5, 5), {"batch_dims": 1}),
        ((2, 2, 5, 5), {"batch_dims": 2}),
        ((15, 5), {"pieces": 3}),
        ((2, 10, 5), {"batch_dims": 1, "pieces": 2}),
    ],
)
@pytest.mark.parametrize(("method", "more"), SEPARATE.values(), ids=SEPARATE)
def test_stacked_matrices_and_pieces_are_separate_parameters(method, more, shape, options):
    tensors, grads = problem([shape], 32 if method == "FullMatrixAdam" else 8)
    together, apart = parameters(tensors), parameters(tensors[0].reshape(-1, 5, 5).unbind(0))
    build = getattr(eshampoo, method)
    run(build(together, **options, **more), together, grads)
    run(build(apart, **more), apart, [[*G.reshape(-1, 5, 5).unbind(0)] for (G,) in grads])
    assert_close(together[0].detach().reshape(-1, 5, 5), torch.stack([*apart]).detach(), 1e-12)


def test_pieces_that_are_not_equal_are_refused_by_name_and_vectors_need_none():
    for rows in (2, 4, 10):  # also fewer rows than pieces
        qkv, bias = parameters([torch.ones(rows, 4), torch.ones(rows)])
        with pytest.raises(ValueError, match=r"pieces=3.*'qkv'"):
            EShampoo([("qkv", qkv), ("bias", bias)], pieces=3)
    EShampoo([{"params": [qkv]}, {"params": [bias], "pieces": 3}])
