"""The paper's lemma, propositions and corollary as numbers: dense, seeded, without the library.

Expectations are exact: a "distribution of gradients" is a finite list of matrices with
probabilities, so every E[·] below is a sum. vec stacks columns, as in the paper, hence
vec(Q_L X Q_Rᵀ) = (Q_R ⊗ Q_L) vec(X).
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import approximation_error, factor_and_basis, off_diagonal_share

SLACK = 1e-9  # relative, for rounding in inequalities
EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, database=None)

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 5)
powers = st.sampled_from([0.25, 0.5, 1.0, 2.0])


def vec(X):
    return X.flatten(order="F")


def norm(X):
    return np.linalg.norm(X)


def orthogonal(rng, d):
    return np.linalg.qr(rng.standard_normal((d, d)))[0]


def power(C, p):
    """C^p of a symmetric positive definite matrix."""
    λ, Q = np.linalg.eigh(C)
    assert λ.min() > 0
    return (Q * λ**p) @ Q.T


def eigenvectors(C):
    return np.linalg.eigh(C)[1]


class Gradients:
    """A random gradient with finitely many values, E[g gᵀ] positive definite."""

    def __init__(self, rng, m, n):
        count = 2 * m * n + 3
        spread = np.exp(rng.standard_normal((m, n)))
        self.values = [rng.standard_normal((m, n)) * spread for _ in range(count)]
        self.probabilities = rng.dirichlet(np.ones(count))

    def mean(self, f):
        """E[f(G)]."""
        return sum(p * f(G) for p, G in zip(self.probabilities, self.values, strict=True))

    def full(self):
        """E[g gᵀ], the idealised preconditioner of full-matrix Adam."""
        return self.mean(lambda G: np.outer(vec(G), vec(G)))

    def factors(self):
        """L = E[G Gᵀ] and R = E[Gᵀ G]."""
        return self.mean(lambda G: G @ G.T), self.mean(lambda G: G.T @ G)


def generalized_update(G, Q_L, Q_R, D, p):
    """U = Q_L (D^{⊙−p} ⊙ (Q_Lᵀ G Q_R)) Q_Rᵀ, Lemma 1."""
    return Q_L @ (D**-p * (Q_L.T @ G @ Q_R)) @ Q_R.T


def assert_near(value, expected, tolerance=1e-9):
    """Equal up to a share of the norm: single entries may be small by cancellation."""
    assert norm(value - expected) <= tolerance * norm(expected)


def assert_between(low, value, high):
    assert low * (1 - SLACK) <= value <= high * (1 + SLACK)


# Lemma 1 ------------------------------------------------------------------------------------------


@EXAMPLES
@given(seed=seeds, m=sizes, n=sizes, p=powers)
def test_the_entries_of_d_bound_the_length_of_the_generalized_update(seed, m, n, p):
    rng = np.random.default_rng(seed)
    Q_L, Q_R, G = orthogonal(rng, m), orthogonal(rng, n), rng.standard_normal((m, n))
    D = np.exp(2 * rng.standard_normal((m, n)))
    U = generalized_update(G, Q_L, Q_R, D, p)
    assert_between(D.max() ** -p * norm(G), norm(U), D.min() ** -p * norm(G))


@pytest.mark.parametrize("p", [0.25, 0.5, 1.0])
def test_both_bounds_of_lemma_one_are_attained(p):
    rng = np.random.default_rng(0)
    Q_L, Q_R, D = orthogonal(rng, 3), orthogonal(rng, 4), np.exp(rng.standard_normal((3, 4)))
    for extreme in [D.argmin(), D.argmax()]:
        E = np.zeros((3, 4))
        E.flat[extreme] = 2.0
        G = Q_L @ E @ Q_R.T  # a gradient along one eigenvector
        U = generalized_update(G, Q_L, Q_R, D, p)
        assert norm(U) == pytest.approx(D.flat[extreme] ** -p * norm(G), rel=1e-12)


@EXAMPLES
@given(seed=seeds, m=sizes, n=sizes)
def test_the_generalized_update_covers_adam_shampoo_and_shampoo_squared(seed, m, n):
    rng = np.random.default_rng(seed)
    gradients = Gradients(rng, m, n)
    G, (L, R) = gradients.values[0], gradients.factors()
    (λ_L, Q_L), (λ_R, Q_R) = np.linalg.eigh(L), np.linalg.eigh(R)
    D = np.outer(λ_L, λ_R)  # mat diag(Λ_R ⊗ Λ_L)
    shampoo = power(L, -1 / 4) @ G @ power(R, -1 / 4)
    assert_near(generalized_update(G, Q_L, Q_R, D, 1 / 4), shampoo, 1e-8)
    dense = power(np.kron(R, L), -1 / 2) @ vec(G)
    squared = generalized_update(G, Q_L, Q_R, D, 1 / 2)
    assert_near(vec(squared), dense, 1e-7)
    second_moment = gradients.mean(np.square)
    adam = generalized_update(G, np.eye(m), np.eye(n), second_moment, 1 / 2)
    assert_near(adam, G / np.sqrt(second_moment))


# Proposition 1 ------------------------------------------------------------------------------------


def updates(gradients, G, p):
    """The idealised updates of Proposition 1's first part, by name."""
    m, n = G.shape
    L, R = gradients.factors()
    Q_L, Q_R = eigenvectors(L), eigenvectors(R)
    D_adam = gradients.mean(np.square)
    D = gradients.mean(lambda G: (Q_L.T @ G @ Q_R) ** 2)
    return {
        "full-matrix Adam": power(gradients.full(), -p) @ vec(G),
        "Adam": generalized_update(G, np.eye(m), np.eye(n), D_adam, p),
        "EShampoo": generalized_update(G, Q_L, Q_R, D, p),
    }


@EXAMPLES
@given(seed=seeds, m=sizes, n=sizes, p=powers)
def test_the_extreme_eigenvalues_of_full_matrix_adam_bound_all_three_updates(seed, m, n, p):
    rng = np.random.default_rng(seed)
    gradients = Gradients(rng, m, n)
    λ = np.linalg.eigvalsh(gradients.full())
    for G in [*gradients.values[:3], rng.standard_normal((m, n))]:
        for U in updates(gradients, G, p).values():
            assert_between(λ.max() ** -p * norm(G), norm(U), λ.min() ** -p * norm(G))


def test_both_bounds_are_attained_by_full_matrix_adam():
    gradients = Gradients(np.random.default_rng(1), 3, 4)
    λ, Q = np.linalg.eigh(gradients.full())
    for i in [0, -1]:
        U = power(gradients.full(), -1 / 2) @ (3 * Q[:, i])
        assert norm(U) == pytest.approx(3 * λ[i] ** -0.5, rel=1e-9)


@EXAMPLES
@given(seed=seeds, m=sizes, n=sizes)
def test_every_entry_of_d_is_a_rayleigh_quotient_of_the_full_matrix(seed, m, n):
    rng = np.random.default_rng(seed)
    gradients = Gradients(rng, m, n)
    Q_L, Q_R = orthogonal(rng, m), orthogonal(rng, n)  # any orthogonal pair will do
    D = gradients.mean(lambda G: (Q_L.T @ G @ Q_R) ** 2)
    Q = np.kron(Q_R, Q_L)
    assert_near(vec(D), np.diag(Q.T @ gradients.full() @ Q))
    λ = np.linalg.eigvalsh(gradients.full())
    assert_between(λ.min(), D.min(), D.max())
    assert_between(D.min(), D.max(), λ.max())


def test_stale_eigenvalues_leave_the_bounds_of_full_matrix_adam():
    gradients = Gradients(np.random.default_rng(2), 2, 2)
    A = gradients.full()
    λ = np.linalg.eigvalsh(A)
    shrink = 0.1 * np.sqrt(λ.min() / λ.max())  # the gradients have become smaller since
    G = shrink * gradients.values[0]
    stale, fresh = power(A, -1 / 2) @ vec(G), power(shrink**2 * A, -1 / 2) @ vec(G)
    low, high = (shrink**2 * λ.max()) ** -0.5 * norm(G), (shrink**2 * λ.min()) ** -0.5 * norm(G)
    assert norm(stale) < 0.5 * low
    assert_between(low, norm(fresh), high)


class IndependentSigns(Gradients):
    """G_ij = ± S_ij with independent fair signs: every sign pattern once, E[G] = 0."""

    def __init__(self, S):
        patterns = itertools.product([-1.0, 1.0], repeat=S.size)
        self.values = [np.reshape(signs, S.shape) * S for signs in patterns]
        self.probabilities = np.full(len(self.values), 1 / len(self.values))


def shampoo_update(gradients, G, p):
    """C^{−p} g with C = (R ⊗ L)^{1/2}."""
    L, R = gradients.factors()
    return power(L, -p / 2) @ G @ power(R, -p / 2)


small_shapes = st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 3), (3, 2), (2, 4)])


@settings(EXAMPLES, max_examples=20)
@given(seed=seeds, shape=small_shapes, p=powers)
def test_with_independent_entries_shampoos_bounds_shrink_with_the_dimensions(seed, shape, p):
    rng = np.random.default_rng(seed)
    m, n = shape
    gradients = IndependentSigns(np.exp(rng.standard_normal(shape)))
    A = gradients.full()
    assert_near(A, np.diag(np.diag(A)), 1e-12)  # independence, E[G] = 0
    λ = np.linalg.eigvalsh(A)
    second_moment = gradients.mean(np.square)
    assert_between(λ.min(), second_moment.min(), second_moment.max())
    assert_between(second_moment.min(), second_moment.max(), λ.max())
    dimensions = (m * n) ** (-p / 2)
    for G in [gradients.values[0], rng.standard_normal(shape)]:
        U = shampoo_update(gradients, G, p)
        low, high = λ.max() ** -p * norm(G), λ.min() ** -p * norm(G)
        assert_between(dimensions * low, norm(U), dimensions * high)


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (2, 4)])
def test_with_equal_variances_shampoo_is_too_short_by_exactly_the_root_of_the_size(shape):
    gradients = IndependentSigns(np.full(shape, 0.7))
    G = np.random.default_rng(3).standard_normal(shape)
    p = 1 / 2
    adam = updates(gradients, G, p)
    shampoo = shampoo_update(gradients, G, p)
    for U in adam.values():
        assert norm(U) == pytest.approx(norm(G) / 0.7, rel=1e-12)
    expected = np.prod(shape) ** (-p / 2) * norm(G) / 0.7
    assert norm(shampoo) == pytest.approx(expected, rel=1e-12)


# Proposition 2 ------------------------------------------------------------------------------------


def distance(C, Q, D):
    """‖C − Q diag(D) Qᵀ‖_F."""
    return norm(C - (Q * D) @ Q.T)


@EXAMPLES
@given(seed=seeds, d=st.integers(1, 8), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_any_change_of_the_optimal_correction_adds_just_its_own_square(seed, d, scale):
    rng = np.random.default_rng(seed)
    C, Q = rng.standard_normal((d, d)), orthogonal(rng, d)
    C = C + C.T  # symmetric, not even definite
    D = np.diag(Q.T @ C @ Q)
    change = scale * rng.standard_normal(d)
    squared = distance(C, Q, D + change) ** 2
    assert squared == pytest.approx(distance(C, Q, D) ** 2 + norm(change) ** 2, rel=1e-9)
    assert squared > distance(C, Q, D) ** 2 * (1 - SLACK)


def test_least_squares_over_diagonal_matrices_finds_the_optimal_correction():
    rng = np.random.default_rng(4)
    C, Q = rng.standard_normal((6, 6)), orthogonal(rng, 6)
    C = C + C.T
    columns = np.stack([np.outer(q, q).ravel() for q in Q.T], axis=1)  # Q diag(D) Qᵀ = Σ D_i q qᵀ
    D = np.linalg.lstsq(columns, C.ravel(), rcond=None)[0]
    assert_near(np.diag(Q.T @ C @ Q), D)


def test_the_idealized_optimum_is_the_second_moment_in_the_basis():
    rng = np.random.default_rng(5)
    gradients = Gradients(rng, 3, 4)
    Q = orthogonal(rng, 12)
    D = gradients.mean(lambda G: (Q.T @ vec(G)) ** 2)
    assert_near(np.diag(Q.T @ gradients.full() @ Q), D)


@EXAMPLES
@given(seed=seeds, d=st.integers(1, 6), T=st.integers(1, 12))
def test_the_adagrad_optimum_is_the_sum_of_all_gradients_seen_in_the_last_basis(seed, d, T):
    rng = np.random.default_rng(seed)
    gs, Q = rng.standard_normal((T, d)), orthogonal(rng, d)
    C = sum(np.outer(g, g) for g in gs)
    D = sum((Q.T @ g) ** 2 for g in gs)
    assert_near(np.diag(Q.T @ C @ Q), D)


@EXAMPLES
@given(seed=seeds, d=st.integers(1, 6), T=st.integers(1, 12), beta2=st.sampled_from([0.5, 0.99]))
def test_the_adam_optimum_is_the_weighted_sum_in_the_last_basis(seed, d, T, beta2):
    rng = np.random.default_rng(seed)
    gs, Q = rng.standard_normal((T, d)), orthogonal(rng, d)
    C = np.zeros((d, d))
    for g in gs:  # the recursion of the proposition
        C = beta2 * C + (1 - beta2) * np.outer(g, g)
    D = (1 - beta2) * sum(beta2 ** (T - t) * (Q.T @ g) ** 2 for t, g in enumerate(gs, start=1))
    assert_near(np.diag(Q.T @ C @ Q), D)


def test_averaging_in_the_basis_of_each_step_is_worse_than_the_optimum_unless_it_stands_still():
    rng = np.random.default_rng(6)
    gs, beta2 = rng.standard_normal((10, 5)), 0.9
    C, naive, standing = np.zeros((5, 5)), np.zeros(5), np.zeros(5)
    fixed = orthogonal(rng, 5)
    for g in gs:
        C = beta2 * C + (1 - beta2) * np.outer(g, g)
        Q = eigenvectors(C)
        naive = beta2 * naive + (1 - beta2) * (Q.T @ g) ** 2
        standing = beta2 * standing + (1 - beta2) * (fixed.T @ g) ** 2
    assert distance(C, Q, naive) > distance(C, Q, np.diag(Q.T @ C @ Q)) + 1e-3
    assert_near(standing, np.diag(fixed.T @ C @ fixed))


@EXAMPLES
@given(seed=seeds, d=st.integers(1, 6))
def test_the_basis_aware_map_is_the_exact_recursion_for_a_diagonal_old_statistic(seed, d):
    rng = np.random.default_rng(seed)
    Q_old, Q_new, v = orthogonal(rng, d), orthogonal(rng, d), np.exp(rng.standard_normal(d))
    C, g, beta2 = (Q_old * v) @ Q_old.T, rng.standard_normal(d), 0.9
    exact = np.diag(Q_new.T @ (beta2 * C + (1 - beta2) * np.outer(g, g)) @ Q_new)
    transition = Q_new.T @ Q_old  # R_{T, T−1}
    aware = beta2 * transition**2 @ v + (1 - beta2) * (Q_new.T @ g) ** 2
    assert_near(aware, exact)


# Corollary ----------------------------------------------------------------------------------------


def shampoo_preconditioner(L, R):
    return np.kron(power(R, 1 / 2), power(L, 1 / 2))


def caspr_preconditioner(L, R):
    """C with C^{−1/2} = ((I ⊗ L^{−1/4} + R^{−1/4} ⊗ I)/2)², Duvvuri et al. (ICLR 2024).

    This Kronecker sum is their update (L^{−1/2} G + 2 L^{−1/4} G R^{−1/4} + G R^{−1/2})/4.
    """
    I_m, I_n = np.eye(len(L)), np.eye(len(R))
    half_sum = (np.kron(I_n, power(L, -1 / 4)) + np.kron(power(R, -1 / 4), I_m)) / 2
    return power(half_sum, -4)


def damped_factors(gradients, damping=1e-3):
    L, R = gradients.factors()
    return L + damping * np.eye(len(L)), R + damping * np.eye(len(R))


def test_the_kronecker_sum_is_the_published_update_of_caspr():
    gradients = Gradients(np.random.default_rng(7), 3, 4)
    L, R = damped_factors(gradients)
    G = gradients.values[0]
    dense = power(caspr_preconditioner(L, R), -1 / 2) @ vec(G)
    L_4, R_4 = power(L, -1 / 4), power(R, -1 / 4)
    published = (L_4 @ L_4 @ G + 2 * L_4 @ G @ R_4 + G @ R_4 @ R_4) / 4
    assert_near(dense, vec(published), 1e-8)


@EXAMPLES
@given(seed=seeds, m=sizes, n=sizes)
def test_the_optimal_correction_is_closer_than_shampoo_and_caspr(seed, m, n):
    gradients = Gradients(np.random.default_rng(seed), m, n)
    C = gradients.full()
    L, R = damped_factors(gradients)
    Q = np.kron(eigenvectors(R), eigenvectors(L))
    optimal = distance(C, Q, np.diag(Q.T @ C @ Q))
    others = {
        "Shampoo": shampoo_preconditioner(L, R),
        "Shampoo²": np.kron(R, L),
        "S⁻¹ Shampoo²": np.kron(R, L) / np.trace(L),
        "CASPR": caspr_preconditioner(L, R),
    }
    for C_other in others.values():
        rotated = Q.T @ C_other @ Q  # Lemma 3.4 of CASPR: the same eigenvectors
        assert_near(rotated, np.diag(np.diag(rotated)), 1e-8)
        assert optimal <= norm(C - C_other) * (1 + SLACK)


def test_the_corollary_needs_the_eigenvectors_of_the_factors():
    # For C = C_R ⊗ C_L the trace-scaled Shampoo² is exact, so only the right basis can match it.
    rng = np.random.default_rng(8)
    L_half, R_half = rng.standard_normal((3, 3)), rng.standard_normal((4, 4))
    units = [np.outer(e, f) for e in np.eye(3) for f in np.eye(4)]
    gradients = [L_half @ E @ R_half.T for E in units]  # Σ g gᵀ = R_half R_halfᵀ ⊗ L_half L_halfᵀ
    C = sum(np.outer(vec(G), vec(G)) for G in gradients)
    L, R = sum(G @ G.T for G in gradients), sum(G.T @ G for G in gradients)
    assert np.trace(L) == pytest.approx(np.trace(R), rel=1e-12)
    assert_near(np.kron(R, L) / np.trace(L), C, 1e-10)
    Q = np.kron(eigenvectors(R), eigenvectors(L))
    other = np.kron(orthogonal(rng, 4), orthogonal(rng, 3))
    assert distance(C, Q, np.diag(Q.T @ C @ Q)) <= 1e-10 * norm(C)
    assert distance(C, other, np.diag(other.T @ C @ other)) > 0.1 * norm(C)


# Equation (criterion) -----------------------------------------------------------------------------


@EXAMPLES
@given(seed=seeds, d=st.integers(1, 8))
def test_the_error_of_a_stale_basis_is_the_off_diagonal_share(seed, d):
    L, Q = factor_and_basis(seed, d)
    error = approximation_error(L, Q)
    assert off_diagonal_share(Q.T @ L @ Q) == pytest.approx(error, rel=1e-9, abs=1e-12)
    assert error < 1  # so τ = 1 never recomputes


def test_the_error_is_zero_in_the_eigenbasis_alone():
    L, Q = factor_and_basis(9, 6)
    assert approximation_error(L, eigenvectors(L)) < 1e-12
    assert approximation_error(L, Q) > 1e-2
