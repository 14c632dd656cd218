"""A few hundred random cases against the oracles, and all that ever failed; see fuzz.py."""

import pytest
from fuzz import CORPUS, Case, Parameter, cases, check, random_cases
from hypothesis import Phase, example, given, seed, settings


def with_corpus(test):
    """Every case that once failed is tried first."""
    for case in CORPUS:
        test = example(case=case)(test)
    return test


# Several tests, so that they are spread over processes; fixed, so that a failure is a new one.
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_any_case_follows_the_oracle(part):
    @seed(part)
    @random_cases(75)
    @given(case=cases())
    def attempt(case):
        check(case)

    attempt()


@settings(max_examples=1, phases=[Phase.explicit], deadline=None)
@with_corpus
@given(case=cases())
def test_cases_that_once_failed_follow_the_oracle(case):
    check(case)


def test_a_wrong_optimizer_is_found(monkeypatch):
    """The net has no hole: a basis that is never refreshed, or a wrong β, is seen at once."""
    case = Case(
        method="EShampoo",
        groups=({"lr": 1e-2, "betas": (0.9, 0.95), "tau": 0.0, "merge_dims": False},),
        parameters=(Parameter((3, 4)),),
    )
    check(case)
    with monkeypatch.context() as patch:
        patch.setattr("eshampoo.step.step.refresh_", lambda tasks: ([], []))
        with pytest.raises(AssertionError, match="from the oracle"):
            check(case)
    with monkeypatch.context() as patch:
        patch.setattr("eshampoo.step.phases.share", lambda beta, live: live * 0.06)
        with pytest.raises(AssertionError, match="from the oracle"):
            check(case)
