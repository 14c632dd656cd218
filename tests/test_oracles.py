"""The oracles themselves: torch's AdamW, equations written out, and reductions."""

import numpy as np
import oracles
import pytest
import torch
from beside_oracles import trajectory
from training import assert_close, problem


def dense_root(C, p):
    """C^p of a symmetric positive definite matrix."""
    λ, Q = torch.linalg.eigh(C)
    return Q @ torch.diag(λ**p) @ Q.T


# Others' implementations --------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [[()], [(5,)], [(3, 4), (2, 3, 2), ()]])
@pytest.mark.parametrize("maximize", [False, True])
def test_adamw_follows_torch(shapes, maximize):
    params, grads = problem(shapes, 20)
    oracle = oracles.AdamW(params, 1e-2, (0.8, 0.95), 1e-8, 0.1, maximize=maximize)
    theirs = [torch.nn.Parameter(W.clone()) for W in params]
    adamw = torch.optim.AdamW(theirs, 1e-2, (0.8, 0.95), 1e-8, 0.1, maximize=maximize)
    for step in grads:
        oracle.step(step)
        for W, G in zip(theirs, step, strict=True):
            W.grad = G
        adamw.step()
        for ours, W in zip(oracle.params, theirs, strict=True):
            assert_close(ours, W.detach(), 1e-14)


# Blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "max_dim", "merge_dims", "merged"),
    [
        ((6, 4, 3, 3), 16, True, (6, 4, 9)),
        ((6, 4, 3, 3), 36, True, (6, 36)),
        ((6, 4, 3, 3), 16, False, (6, 4, 3, 3)),
        ((2, 3, 20, 2), 16, True, (6, 20, 2)),
        ((5, 1), 16, False, (5,)),
        ((1, 1), 16, True, ()),
        ((), 16, True, ()),
        ((4, 4), 16, True, (16,)),
    ],
)
def test_small_neighbours_merge_from_the_last_dimension(shape, max_dim, merge_dims, merged):
    assert oracles.merged_shape(shape, max_dim, merge_dims) == merged


def test_blocks_cover_a_parameter_once_with_a_ragged_end():
    oracle = oracles.EShampoo([torch.zeros(40, 24)], max_dim=16)
    seen = torch.zeros(40, 24)
    for block in oracle.blocks[0]:
        block.of(seen).add_(1)
    assert [tuple(block.M.shape) for block in oracle.blocks[0]] == [
        (16, 16), (16, 8), (16, 16), (16, 8), (8, 16), (8, 8)
    ]  # fmt: skip
    assert (seen == 1).all()


def test_blocks_are_independent_parameters():
    params, grads = problem([(7, 5)], 12)
    options = {"lr": 1e-2, "tau": 0.0, "frequency": 3, "merge_dims": False, "betas": (0.9, 0.9)}
    whole = oracles.EShampoo(params, max_dim=5, **options)
    parts = oracles.EShampoo([params[0][:5], params[0][5:]], max_dim=5, **options)
    for (G,) in grads:
        whole.step([G])
        parts.step([G[:5], G[5:]])
    assert_close(whole.params[0], torch.cat(parts.params))


@pytest.mark.parametrize("method", [oracles.EShampoo, oracles.SOAP, oracles.KLShampoo])
def test_an_oversize_mode_without_basis_has_no_factor_and_the_other_one_has(method):
    params, grads = problem([(3, 9)], 12)
    oracle = method(params, frequency=2, tau=0.0, max_dim=8, oversize="identity")
    trajectory(oracle, grads)
    (block,) = oracle.blocks[0]
    assert [Q is None for Q in block.Q] == [False, True]
    assert not torch.equal(block.Q[0], torch.eye(3, dtype=torch.float64))


# Which parameters are elementwise -----------------------------------------------------------------

METHODS = [oracles.EShampoo, oracles.Shampoo, oracles.KLShampoo]


@pytest.mark.parametrize("method", METHODS)
def test_without_any_basis_every_method_is_adamw(method):
    params, grads = problem([(), (4,), (1, 1), (3, 5), (2, 3, 2)], 9)
    plain = trajectory(oracles.AdamW(params, betas=(0.9, 0.95)), grads)
    options = {"betas": (0.9, 0.95), "frequency": 2, "tau": 0.0}
    assert_close(trajectory(method(params, matrices="adam", **options), grads), plain)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("shape", "vectors"),
    [((2, 3), "adam"), ((2, 1, 3), "adam"), ((5, 1), "full"), ((1, 1, 5), "full")],
)
def test_a_matrix_that_merges_to_one_mode_is_its_vector_under_full_matrix_adam(
    method, shape, vectors
):
    """What has two dimensions above 1 merges whatever `vectors` says; what has one is a vector."""
    params, grads = problem([shape], 15, condition=3.0)
    options = {"frequency": 7, "tau": 0.0, "betas": (0.9, 0.95), "merge_dims": True}
    matrix = trajectory(method(params, vectors=vectors, **options), grads)
    flat = [[G.flatten()] for (G,) in grads]
    vector = trajectory(method([params[0].flatten()], vectors="full", **options), flat)
    assert_close(matrix, vector)
    elementwise = trajectory(method([params[0].flatten()], vectors="adam", **options), flat)
    assert (matrix - elementwise).abs().max() > 1e-4


def test_full_matrix_adam_is_eshampoo_with_one_mode_for_orders_zero_to_three():
    params, grads = problem([(), (5,), (2, 3), (2, 2, 2)], 20)
    options = {"frequency": 10, "tau": 0.0, "betas": (0.9, 0.95)}
    flat = oracles.EShampoo([W.reshape(-1) for W in params], vectors="full", **options)
    full = trajectory(oracles.FullMatrixAdam(params, max_dim=8, **options), grads)
    assert_close(full, trajectory(flat, [[G.reshape(-1) for G in step] for step in grads]))


# EShampoo -----------------------------------------------------------------------------------------


def test_before_the_first_basis_eshampoo_is_adamw_and_afterwards_it_is_not():
    params, grads = problem([(4, 6)], 12, condition=3.0)
    ours = trajectory(oracles.EShampoo(params, frequency=10, tau=0.0, merge_dims=False), grads)
    plain = trajectory(oracles.AdamW(params, betas=(0.9, 0.95)), grads)
    assert_close(ours[:9], plain[:9], 1e-14)
    assert (ours[9] - plain[9]).abs().max() > 1e-5


def test_a_matrix_follows_algorithm_two_written_out():
    params, grads = problem([(4, 5)], 12)
    beta1, beta2, lr, eps, decay, F = 0.9, 0.99, 1e-2, 1e-8, 0.1, 3
    options = {"frequency": F, "tau": 0.0, "rms": None}
    oracle = oracles.EShampoo(params, lr, (beta1, beta2), eps, decay, **options)
    W = params[0]
    M, D = torch.zeros(4, 5, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.float64)
    L, Q_L = torch.zeros(4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    R, Q_R = torch.zeros(5, 5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    for t, (G,) in enumerate(grads, start=1):
        M = beta1 * M + (1 - beta1) * G
        L = beta2 * L + (1 - beta2) * G @ G.T
        R = beta2 * R + (1 - beta2) * G.T @ G
        if t % F == 0:
            Q_L, Q_R = torch.linalg.eigh(L).eigenvectors, torch.linalg.eigh(R).eigenvectors
        D = beta2 * D + (1 - beta2) * (Q_L.T @ G @ Q_R) ** 2
        M̃, D̃ = M / (1 - beta1**t), D / (1 - beta2**t)
        W = W - lr * (Q_L @ ((Q_L.T @ M̃ @ Q_R) / (D̃.sqrt() + eps)) @ Q_R.T + decay * W)
        oracle.step([G])
        assert_close(oracle.params[0], W)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 2)])
def test_the_optimal_correction_is_the_dense_preconditioner_of_algorithm_one(shape):
    params, grads = problem([shape], 30)
    options = {"lr": 1.0, "betas": (0.0, 0.9), "eps": 0.0, "weight_decay": 0.0}
    options |= {"vectors": "full", "frequency": 15, "tau": 0.0, "rms": None}
    oracle = oracles.EShampoo(params, **options, correction="optimal")
    A = 0.0
    for t, (G,) in enumerate(grads, start=1):
        g = G.flatten()
        A = 0.9 * A + 0.1 * torch.outer(g, g)
        before = oracle.params[0].clone()
        oracle.step([G])
        if t % 15 == 0:
            Q = torch.ones(1, 1, dtype=torch.float64)
            for L in oracle.blocks[0][0].L:
                Q = torch.kron(Q, torch.linalg.eigh(L).eigenvectors.contiguous())
            C = Q @ torch.diag((Q.T @ A @ Q).diag()) @ Q.T / (1 - 0.9**t)
            if len(shape) == 1:  # one mode: nothing is lost
                assert_close(C, A / (1 - 0.9**t))
            update = (before - oracle.params[0]).flatten()
            assert_close(update, dense_root(C, -1 / 2) @ g, 1e-9)


@pytest.mark.parametrize("correction", ["basis_aware", "optimal"])
@pytest.mark.parametrize("shape", [(4, 3), (3, 2, 4)])
def test_the_corrections_agree_while_the_basis_stands_and_differ_once_it_moves(correction, shape):
    params, grads = problem([shape], 12, condition=3.0)
    options = {"frequency": 6, "tau": 0.0, "merge_dims": False, "betas": (0.9, 0.95)}
    naive = trajectory(oracles.EShampoo(params, **options), grads)
    other = trajectory(oracles.EShampoo(params, correction=correction, **options), grads)
    assert_close(other[:5], naive[:5])
    assert (other[5] - naive[5]).abs().max() > 1e-5


def test_the_basis_aware_map_is_exact_when_the_old_statistic_was_diagonal():
    # One gradient entry at a time keeps A diagonal in the standard basis, so V^{⊙2} loses nothing.
    W = torch.zeros(3, dtype=torch.float64)
    basis = torch.eye(3, dtype=torch.float64)
    grads = [[basis[i] * (i + 1)] for i in range(3)] + [[torch.ones(3, dtype=torch.float64)]]
    options = {"vectors": "full", "frequency": 4, "tau": 0.0}
    aware = trajectory(oracles.EShampoo([W], correction="basis_aware", **options), grads)
    optimal = trajectory(oracles.EShampoo([W], correction="optimal", **options), grads)
    naive = trajectory(oracles.EShampoo([W], **options), grads)
    assert_close(aware, optimal)
    assert (naive - optimal).abs().max() > 1e-6


def test_beta3_averages_d_alone():
    params, grads = problem([(4, 6)], 8, condition=3.0)
    options = {"frequency": 2, "tau": 0.0, "merge_dims": False}
    same = trajectory(oracles.EShampoo(params, betas=(0.9, 0.95), beta3=0.95, **options), grads)
    assert_close(same, trajectory(oracles.EShampoo(params, betas=(0.9, 0.95), **options), grads))
    oracle = oracles.EShampoo(params, betas=(0.9, 0.95), beta3=0.5, **options)
    trajectory(oracle, grads)
    L = sum(0.05 * 0.95 ** (8 - t) * G @ G.T for t, (G,) in enumerate(grads, start=1))
    assert_close(oracle.blocks[0][0].L[0], L)
    standing = oracles.EShampoo(params, betas=(0.9, 0.95), beta3=0.5, frequency=100)
    trajectory(standing, grads)
    D = sum(0.5 * 0.5 ** (8 - t) * G**2 for t, (G,) in enumerate(grads, start=1))
    assert_close(standing.blocks[0][0].D.view(4, 6), D)


def test_beta2_of_one_is_the_adagrad_sum_without_bias_correction():
    params, grads = problem([(5,)], 6)
    oracle = oracles.EShampoo(params, lr=0.1, betas=(0.0, 1.0), weight_decay=0.0, eps=1e-10)
    theirs = torch.nn.Parameter(params[0].clone())
    adagrad = torch.optim.Adagrad([theirs], lr=0.1, eps=1e-10)
    for (G,) in grads:
        oracle.step([G])
        theirs.grad = G
        adagrad.step()
        assert_close(oracle.params[0], theirs.detach())
    full = oracles.EShampoo(params, betas=(0.0, 1.0), vectors="full", frequency=2, tau=0.0)
    trajectory(full, grads)
    assert_close(full.blocks[0][0].L[0], sum(torch.outer(g, g) for (g,) in grads))


def test_nesterov_averages_the_gradient_in_once_more():
    W, g = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    oracle = oracles.AdamW([W], lr=1.0, weight_decay=0.0, eps=0.0, nesterov=True)
    oracle.step([g])  # M = 0.1 g, so (0.9 · 0.1 + 0.1) g / (1 − 0.9²) over |g|
    assert_close(oracle.params[0], -g.sign() * 0.19 / 0.19)
    oracle.step([2 * g])
    M = 0.9 * 0.1 * g + 0.1 * 2 * g
    D = (0.999 * 0.001 * g**2 + 0.001 * 4 * g**2) / (1 - 0.999**2)
    assert_close(oracle.params[0], -g.sign() - (0.9 * M + 0.1 * 2 * g) / (1 - 0.9**3) / D.sqrt())


def test_a_missing_gradient_leaves_everything_alone_its_own_step_count_included():
    params, grads = problem([(4, 3), (4, 3)], 10)
    options = {"frequency": 3, "tau": 0.0, "merge_dims": False}
    for method in [oracles.EShampoo, oracles.Shampoo, oracles.SOAP, oracles.KLShampoo]:
        gaps = method(params, **options)
        for t, (G, H) in enumerate(grads):
            gaps.step([G, None if t % 2 else H])
        alone = method(params[1:], **options)
        trajectory(alone, [[H] for _, H in grads[::2]])
        assert_close(gaps.params[1], alone.params[0])
        together = method(params[:1], **options)
        trajectory(together, [[G] for G, _ in grads])
        assert_close(gaps.params[0], together.params[0])


# Shampoo ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 2)])
@pytest.mark.parametrize("variant", ["shampoo", "shampoo2"])
def test_shampoo_is_the_inverse_roots_of_its_dense_kronecker_product(shape, variant):
    params, grads = problem([shape], 12)
    options = {"lr": 1.0, "betas": (0.5, 0.9), "weight_decay": 0.0, "eps": 1e-6}
    oracle = oracles.Shampoo(
        params, **options, graft=None, frequency=1, variant=variant, vectors="full",
        merge_dims=False,
    )  # fmt: skip
    for t, (G,) in enumerate(grads, start=1):
        before = oracle.params[0].clone()
        oracle.step([G])
        block = oracle.blocks[0][0]
        C = torch.ones(1, 1, dtype=torch.float64)
        for L in block.L:
            C = torch.kron(C, L / (1 - 0.9**t) + 1e-6 * torch.eye(len(L), dtype=torch.float64))
        M = block.M / (1 - 0.5**t)
        p = -1 / (2 * len(shape)) if variant == "shampoo" else -1 / 2
        expected = (dense_root(C, p) @ M.flatten()).view(shape)
        assert_close(before - oracle.params[0], expected, 1e-7)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 2)])
def test_trace_scaled_shampoo2_whitens_kronecker_covariances_exactly(shape):
    # Gradients whose sum of g gᵀ is C_1 ⊗ C_2 ⊗ …: the scaled factors multiply to just that.
    factors = [Z + 3 * torch.eye(len(Z)) for Z in problem([(d, d) for d in shape], 0)[0]]
    basis = torch.eye(int(np.prod(shape)), dtype=torch.float64)
    grads = [[oracles.apply(factors, e.view(shape))] for e in basis]
    oracle = oracles.Shampoo(
        [torch.zeros(shape)], lr=1.0, betas=(0.0, 1.0), eps=0.0, weight_decay=0.0, graft=None,
        variant="shampoo2", trace_scaling=True, frequency=len(grads), vectors="full",
        merge_dims=False,
    )  # fmt: skip
    for step in grads[:-1]:
        oracle.step(step)
    before = oracle.params[0].clone()
    oracle.step(grads[-1])
    A = sum(torch.outer(G.flatten(), G.flatten()) for (G,) in grads)
    expected = dense_root(A, -1 / 2) @ grads[-1][0].flatten()
    assert_close((before - oracle.params[0]).flatten(), expected, 1e-10)


def test_before_the_first_root_the_graft_alone_steps_and_without_graft_the_momentum():
    params, grads = problem([(3, 4)], 6, condition=3.0)
    plain = trajectory(oracles.AdamW(params), grads)
    adam = trajectory(oracles.Shampoo(params, frequency=6, merge_dims=False), grads)
    assert_close(adam[:5], plain[:5])
    assert (adam[5] - plain[5]).abs().max() > 1e-6
    sgd = oracles.Shampoo(params, frequency=6, graft="sgd", merge_dims=False)
    none = oracles.Shampoo(params, frequency=6, graft=None, merge_dims=False)
    assert_close(trajectory(sgd, grads[:5]), trajectory(none, grads[:5]))


@pytest.mark.parametrize("graft", ["adam", "rmsprop", "adagrad", "sgd"])
@pytest.mark.parametrize("scope", ["block", "parameter"])
def test_a_grafted_step_has_shampoos_direction_and_the_grafts_length(graft, scope):
    params, grads = problem([(6, 4)], 9, condition=3.0)
    options = {"lr": 1.0, "betas": (0.5, 0.9), "weight_decay": 0.0}
    options |= {"frequency": 3, "max_dim": 4, "merge_dims": False}
    grafted = oracles.Shampoo(params, **options, graft=graft, graft_scope=scope)
    bare = oracles.Shampoo(params, **options, graft=None)
    M, D, S = (torch.zeros(6, 4, dtype=torch.float64) for _ in range(3))
    for t, (G,) in enumerate(grads, start=1):
        starts = grafted.params[0].clone(), bare.params[0].clone()
        grafted.step([G])
        bare.step([G])
        step, U = starts[0] - grafted.params[0], starts[1] - bare.params[0]
        M, D, S = 0.5 * M + 0.5 * G, 0.9 * D + 0.1 * G**2, S + G**2
        denominator = {
            "adam": (D / (1 - 0.9**t)).sqrt() + 1e-8,
            "rmsprop": D.sqrt() + 1e-8,
            "adagrad": S.sqrt() + 1e-8,
            "sgd": torch.ones(6, 4),
        }[graft]
        V = M / (1 - 0.5**t) / denominator
        if t < 3:
            assert_close(step, V)
            continue
        pieces = [slice(0, 4), slice(4, 6)] if scope == "block" else [slice(0, 6)]
        for rows in pieces:
            assert_close(step[rows].norm(), V[rows].norm(), 1e-10)
            cosine = (step[rows] * U[rows]).sum() / step[rows].norm() / U[rows].norm()
            assert_close(cosine, torch.ones((), dtype=torch.float64))


def test_a_zero_direction_is_grafted_to_a_zero_step():
    oracle = oracles.Shampoo([torch.ones(3, 4)], frequency=1, weight_decay=0.0, merge_dims=False)
    oracle.step([torch.zeros(3, 4)])
    assert torch.equal(oracle.params[0], torch.ones(3, 4, dtype=torch.float64))


def test_fresh_eigenvalues_follow_the_kept_basis_and_stale_ones_do_not():
    params, grads = problem([(3, 4)], 12)

    def kept(t):  # a basis at t = 4, kept at t = 8 and t = 12
        return 0.0 if t == 4 else 1.0

    runs = {}
    for eigenvalues in ["stale", "fresh"]:
        oracle = oracles.Shampoo(
            params, frequency=4, tau=kept, eigenvalues=eigenvalues, merge_dims=False
        )
        runs[eigenvalues] = trajectory(oracle, grads)
        (block,) = oracle.blocks[0]
        L, Q = block.L[0] / (1 - 0.999**12), block.Q[0]
        rebuilt = Q @ torch.diag(((Q.T @ L @ Q).diag() + 1e-8) ** (-1 / 4)) @ Q.T
        assert torch.allclose(block.root[0], rebuilt, atol=1e-12) == (eigenvalues == "fresh")
    assert_close(runs["stale"][:7], runs["fresh"][:7])
    assert (runs["stale"][7] - runs["fresh"][7]).abs().max() > 1e-7


# SOAP and KL-Shampoo ------------------------------------------------------------------------------


def test_soap_only_observes_the_first_gradient_of_every_parameter():
    params, grads = problem([(3, 4), (5,), ()], 3)
    oracle = oracles.SOAP(params, weight_decay=0.1)
    oracle.step(grads[0])
    assert all(torch.equal(W, P) for W, P in zip(oracle.params, params, strict=True))
    oracle.step([None, *grads[1][1:]])
    assert torch.equal(oracle.params[0], params[0])
    L, Q = grads[0][0] @ grads[0][0].T, oracle.blocks[0][0].Q[0]
    assert_close((Q.T @ L @ Q).diag(), torch.linalg.eigvalsh(L).flip(0))
    assert all(block.t == t for (block,), t in zip(oracle.blocks, [0, 1, 1], strict=True))
    # t = 1: M̃/√(D̃) = sign(G) up to ε, then the decay of the updated parameter.
    expected = (params[1] - 3e-3 * grads[1][1].sign()) * (1 - 3e-3 * 0.1)
    assert_close(oracle.params[1], expected, 1e-7)


def shrunk(A):
    """A plus a hundredth of its mean eigenvalue."""
    return A + 0.01 * A.trace() / len(A) * torch.eye(len(A), dtype=A.dtype)


def test_kl_shampoo_on_one_mode_is_full_matrix_adam_damped_inside_the_root():
    params, grads = problem([(4,)], 8)
    options = {"lr": 1.0, "betas": (0.0, 0.9), "weight_decay": 0.0, "eps": 0.0}
    oracle = oracles.KLShampoo(params, **options, vectors="full", frequency=1)
    A = torch.zeros(4, 4, dtype=torch.float64)
    for t, (g,) in enumerate(grads, start=1):
        A = 0.9 * A + 0.1 * torch.outer(g, g)
        before = oracle.params[0].clone()
        oracle.step([g])
        expected = dense_root(shrunk(A / (1 - 0.9**t)), -1 / 2) @ g
        assert_close(before - oracle.params[0], expected, 1e-9)


def test_kl_shampoo_on_a_matrix_is_its_two_equations_written_out():
    params, grads = problem([(3, 4)], 6)
    m, n, beta2 = 3, 4, 0.9
    options = {"betas": (0.0, beta2), "eps": 0.0, "weight_decay": 0.0}
    oracle = oracles.KLShampoo(params, lr=1.0, **options, frequency=1, merge_dims=False)
    L, R = torch.zeros(m, m, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    rms = grads[0][0].square().mean().sqrt()
    S_L, S_R = (rms * torch.eye(d, dtype=torch.float64) for d in (m, n))
    for t, (G,) in enumerate(grads, start=1):
        L = beta2 * L + (1 - beta2) / n * G @ torch.linalg.inv(S_R) @ G.T
        R = beta2 * R + (1 - beta2) / m * G.T @ torch.linalg.inv(S_L) @ G
        before = oracle.params[0].clone()
        oracle.step([G])
        # With a basis at every step S is the damped factor itself.
        S_L, S_R = (shrunk(A / (1 - beta2**t)) for A in (L, R))
        expected = dense_root(S_L, -1 / 2) @ G @ dense_root(S_R, -1 / 2)
        difference = before - oracle.params[0] - expected
        assert difference.norm() <= 1e-9 * expected.norm()


@pytest.mark.slow
def test_kl_shampoo_factors_whiten_a_stationary_kronecker_gradient():
    # E[vec G vec Gᵀ] = C_L ⊗ C_R is the fixed point S_L ⊗ S_R of the two equations.
    generator = torch.Generator().manual_seed(0)
    C_L = torch.diag(torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64))
    C_R = torch.diag(torch.tensor([1.0, 0.25], dtype=torch.float64))
    oracle = oracles.KLShampoo([torch.zeros(3, 2)], betas=(0.0, 0.995), merge_dims=False)
    for _ in range(1500):
        Z = torch.randn(3, 2, generator=generator, dtype=torch.float64)
        oracle.step([C_L.sqrt() @ Z @ C_R.sqrt()])
    L, R = oracle.blocks[0][0].L
    target = torch.kron(C_L, C_R)
    assert (torch.kron(L, R) - target).norm() < 0.25 * target.norm()
