"""State that goes out to a file and comes back."""

import copy
import io
import re
import warnings
from pathlib import Path

import pytest
import torch
from keyword_table import METHODS
from training import (
    assert_close,
    assert_same,
    parameters,
    problem,
    run,
    snapshot,
    through_a_file,
    trained,
)

from eshampoo import SOAP, EShampoo, FullMatrixAdam, KLShampoo, Muon, Shampoo, schedules

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHAPES = [(4, 4), (4, 4), (6,), (3, 3, 3), (), (7, 5), (0, 3)]
OPTIONS = {
    "EShampoo": {"frequency": 3, "tau": 0.1, "max_dim": 5},
    "Shampoo": {"frequency": 3, "max_dim": 5},
    "SOAP": {"frequency": 3},
    "KLShampoo": {"frequency": 3, "max_dim": 5},
    "CASPR": {"frequency": 3, "max_dim": 5},
    "FullMatrixAdam": {"frequency": 3, "max_dim": 64},
}


@pytest.mark.parametrize(("at", "dtype"), [(0, "float32"), (1, "bfloat16"), (6, "float64")])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_resumes_bit_for_bit(method, at, dtype):
    dtype = getattr(torch, dtype)
    tensors, grads = problem(SHAPES, 14)
    params = parameters(tensors, dtype)
    optimizer = METHODS[method](params, **OPTIONS[method])
    run(optimizer, params, grads[:at])
    saved, weights = through_a_file(optimizer.state_dict()), copy.deepcopy(params)
    run(optimizer, params, grads[at:])
    resumed = METHODS[method](weights, **OPTIONS[method])
    resumed.load_state_dict(saved)
    run(resumed, weights, grads[at:])
    for p, q in zip(params, weights, strict=True):
        assert torch.equal(p.detach(), q.detach())
        assert_same(optimizer.state.get(p, {}), resumed.state.get(q, {}))
    assert optimizer.basis_report() == resumed.basis_report()


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("EShampoo", {"correction": "optimal"}),
        ("EShampoo", {"vectors": "full", "solver": "partial", "record": True}),
        ("EShampoo", {"correction": "basis_aware", "solver": "power", "nesterov": True}),
        ("Shampoo", {"graft": None, "eigenvalues": "fresh"}),
        ("Shampoo", {"graft": "adagrad", "tau": 0.4}),
        ("SOAP", {"oversize": "identity", "max_dim": 4}),
    ],
)
def test_other_options_resume_bit_for_bit_too(method, more):
    options = {**OPTIONS[method], **more}
    optimizer, params, grads = trained(method, SHAPES, 7, dtype=torch.float32, **options)
    weights = copy.deepcopy(params)
    resumed = METHODS[method](weights, **options)
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    run(optimizer, params, grads)
    run(resumed, weights, grads)
    assert_same([p.detach() for p in params], [p.detach() for p in weights])


def test_counters_survive_beyond_what_bfloat16_can_count():
    (p,) = parameters([torch.ones(2, 2)], torch.bfloat16)
    options = {"frequency": 1, "tau": 1.0, "merge_dims": False}
    optimizer = EShampoo([p], **options)
    run(optimizer, [p], [[torch.eye(2)]] * 301)  # it has no odd number above 256
    other = EShampoo([p], **options)
    other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert other.state[p]["step"].item() == 301
    assert [r.checks for r in other.basis_report()] == [301, 301]


def test_a_file_holds_the_state_once():
    optimizer, params, _ = trained("EShampoo", [(8, 8)] * 20, 2, merge_dims=False)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    needed = sum(v.numel() * v.element_size() for p in params for v in optimizer.state[p].values())
    assert buffer.getbuffer().nbytes < 1.5 * needed + 20 * 4000


def test_a_state_is_a_snapshot_that_nothing_changes():
    """Also where entries lie together in memory: vectors of many lengths, blocks of one size."""
    shapes = [(3,), (7, 5), (), (2, 9), (300,), (1, 6), (4, 4), (4, 4), (3,), (5, 1), (3, 3, 3)]
    optimizer, params, grads = trained("EShampoo", shapes, 4, frequency=2, max_dim=4)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    for p, entries in zip(params, saved["state"].values(), strict=True):
        assert_same(optimizer.state[p], entries)
    run(optimizer, params, grads)
    assert_same(before, saved)
    now = snapshot(optimizer)
    for entries in saved["state"].values():
        for value in entries.values():
            value.fill_(7)
    assert_same(now, snapshot(optimizer))


def machine():
    """The version of torch and the processor: with others, the last bits are others."""
    cpu = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpu.read_text()) if cpu.exists() else None
    return f"{torch.__version__} {found[1] if found else ''}"


@pytest.mark.parametrize("method", ["EShampoo", "Shampoo"])
def test_a_state_that_the_library_saved_before_its_core_was_rearranged_continues_as_then(method):
    """Ragged blocks after five steps, with the next three gradients and where they led.

    At that time, updates of a fixed size were clipped, so EShampoo's are near to them only."""
    recorded = torch.load(FIXTURES / "old_states.pt", weights_only=True)
    old = recorded[method]
    params = parameters(old["weights"])
    optimizer = METHODS[method](params, **old["options"])
    optimizer.load_state_dict(old["state"])
    assert optimizer.basis_computations > 0
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for step, expected in zip(old["grads"], old["after"], strict=True):
        run(optimizer, params, [step])
        for p, W in zip(params, expected, strict=True):
            atol = 1e-3 if method == "EShampoo" else 1e-6
            torch.testing.assert_close(p.detach(), W, rtol=0, atol=atol)
            assert recorded["machine"] != machine() or atol == 1e-3 or torch.equal(p.detach(), W)


# AdamW --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_dim": 3}, {"vectors": "full"}])
def test_an_adamw_state_loads_and_continues_as_adamw_until_the_next_basis(options):
    tensors, grads = problem(SHAPES, 20)
    params = parameters(tensors)
    adamw = torch.optim.AdamW(params, 3e-3, (0.8, 0.9), 1e-5, 0.2)
    run(adamw, params, grads[:7])
    switched = copy.deepcopy(params)
    optimizer = EShampoo(switched, frequency=20, tau=0.0, merge_dims=False, **options)
    optimizer.load_state_dict(through_a_file(adamw.state_dict()))
    group = optimizer.param_groups[0]
    found = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    assert found == (3e-3, (0.8, 0.9), 1e-5, 0.2)
    assert group["frequency"] == 20
    for t, step in enumerate(grads[7:], start=8):
        run(adamw, params, [step])
        run(optimizer, switched, [step])
        gap = max((p - q).abs().max() for p, q in zip(params, switched, strict=True) if p.numel())
        assert gap < 1e-13 if t < 20 else gap > 1e-6, t
    assert optimizer.basis_computations > 0


@pytest.mark.parametrize("source", ["AdamW", "an older EShampoo"])
def test_updates_have_a_sane_size_right_after_a_state_without_norms_of_gradients(source):
    """Such a state says nothing about ‖G‖²: the next gradients alone do."""
    torch.manual_seed(0)
    target, params = torch.randn(20, 12), parameters([torch.zeros(20, 12)])
    optimizer = torch.optim.AdamW(params) if source == "AdamW" else EShampoo(params)

    def sizes(optimizer, steps):
        found = []
        for _ in range(steps):
            before = params[0].detach().clone()
            run(optimizer, params, [[before - target + torch.randn(20, 12)]])
            found.append((params[0].detach() - before).square().mean().sqrt().item())
        return found

    before = sum(sizes(optimizer, 60)[-20:]) / 20
    state_dict = optimizer.state_dict()
    state_dict["state"][0].pop("norm_sq", None)
    optimizer = EShampoo(params)
    optimizer.load_state_dict(state_dict)
    after = sizes(optimizer, 20)
    assert optimizer.basis_computations > 0
    assert before / 3 < min(after) <= max(after) < 3 * before


def test_an_adamw_state_without_steps_and_with_partial_state_loads():
    tensors, grads = problem([(4, 4), (5,)], 4)
    params = parameters(tensors)
    adamw = torch.optim.AdamW(params)
    EShampoo(params).load_state_dict(adamw.state_dict())
    run(adamw, params, [[None, G] for _, G in grads])  # the first has no state
    twin = copy.deepcopy(params)
    optimizer = EShampoo(twin, frequency=50)
    optimizer.load_state_dict(adamw.state_dict())
    run(adamw, params, grads)
    run(optimizer, twin, grads)
    for p, q in zip(params, twin, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


def test_an_adamw_state_continues_in_soap_and_in_grafted_shampoo():
    tensors, grads = problem([(4, 4), (5,)], 12)
    for optimizer_class in (SOAP, Shampoo):
        params = parameters(tensors)
        adamw = torch.optim.AdamW(params)
        run(adamw, params, grads[:6])
        optimizer = optimizer_class(params, frequency=50)
        optimizer.load_state_dict(adamw.state_dict())
        expected, state = params[0].detach().clone(), adamw.state[params[0]]
        assert optimizer.state[params[0]]["step"].item() == 6
        assert torch.equal(optimizer.state[params[0]]["exp_avg"].view(4, 4), state["exp_avg"])
        run(optimizer, params, grads[6:])
        assert not torch.equal(expected, params[0].detach())


CUTS = [{}, {"max_dim": 2}, {"merge_dims": True}, {"state": "lean"}, {"pieces": 2}]


@pytest.mark.parametrize("options", CUTS, ids=str)
def test_before_the_first_basis_adamw_continues_exactly(options):
    """Blocks, convolutions and vectors come back in the shapes of their parameters."""
    shapes = [(4, 6), (4, 3, 2, 2), (6,), ()]
    tensors, grads = problem(shapes, 16)
    params, twins = parameters(tensors), parameters(tensors)
    keywords = {"lr": 3e-3, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.2}
    optimizer = EShampoo(params, frequency=50, rms=None, **keywords, **options)
    adamw, expected = torch.optim.AdamW(params), torch.optim.AdamW(twins, **keywords)
    run(optimizer, params, grads[:8])
    run(expected, twins, grads[:8])
    adamw.load_state_dict(through_a_file(optimizer.adamw_state_dict()))
    run(adamw, params, grads[8:])
    run(expected, twins, grads[8:])
    assert_close(params, twins, 1e-6 if options.get("state") == "lean" else 1e-14)


def test_adamw_goes_on_from_momentum_rotated_back_and_the_diagonal_of_the_second_moment():
    (tensor,), grads = problem([(5, 4)], 12)
    params = parameters([tensor])
    optimizer = EShampoo(params, frequency=1, tau=0.0, beta3=0.7)
    run(optimizer, params, grads)
    entry = {name: value[0] for name, value in optimizer.state[params[0]].items()}
    L, R, D = entry["basis_0"], entry["basis_1"], entry["exp_avg_sq"]
    whole = torch.kron(L, R)
    diagonal = (whole @ torch.diag(D.flatten()) @ whole.T).diagonal().view(5, 4)
    exported = optimizer.adamw_state_dict()
    assert_close(exported["state"][0]["exp_avg"], L @ entry["exp_avg"] @ R.T)
    assert_close(exported["state"][0]["exp_avg_sq"], diagonal)
    assert exported["state"][0]["step"].item() == 12
    assert exported["param_groups"][0]["betas"] == (0.9, 0.7)  # D was averaged with β3
    adamw = torch.optim.AdamW(params)
    adamw.load_state_dict(exported)
    run(adamw, params, grads)
    again = EShampoo(params)
    again.load_state_dict(adamw.state_dict())  # and back


@pytest.mark.parametrize("optimizer_class", [SOAP, Shampoo])
def test_adamw_goes_on_from_soap_and_from_grafted_shampoo(optimizer_class):
    tensors, grads = problem([(4, 4), (5,)], 6)
    params = parameters(tensors)
    optimizer = optimizer_class(params, frequency=2)
    adamw = torch.optim.AdamW(params)
    adamw.load_state_dict(optimizer.adamw_state_dict())  # before the first step, too
    run(optimizer, params, grads)
    adamw.load_state_dict(optimizer.adamw_state_dict())
    run(adamw, params, grads)
    assert all(p.isfinite().all() for p in params)


def test_adamw_starts_frozen_parameters_afresh_and_keeps_keys_of_other_tools():
    p, q = parameters([torch.ones(3, 3), torch.ones(3, 3)])
    q.requires_grad_(False)
    optimizer = EShampoo([{"params": [p, q], "lr_scale": 0.5}], record=True)
    run(optimizer, [p], [[torch.ones(3, 3)]])
    exported = optimizer.adamw_state_dict()
    assert exported["state"].keys() == {0}
    adamw = torch.optim.AdamW([p, q])
    adamw.load_state_dict(exported)
    run(adamw, [p], [[torch.ones(3, 3)]])
    known = {*torch.optim.AdamW([p]).param_groups[0], "lr_scale"}
    assert adamw.param_groups[0].keys() == known


@pytest.mark.parametrize("optimizer_class", [KLShampoo, Muon])
def test_a_method_without_a_second_moment_has_nothing_for_adamw(optimizer_class):
    optimizer = optimizer_class(parameters([torch.ones(3, 3)]))
    with pytest.raises(ValueError, match="without a second moment"):
        optimizer.adamw_state_dict()


# What is refused ----------------------------------------------------------------------------------


def refused(optimizer, state_dict, *words):
    before = snapshot(optimizer)
    untouched = copy.deepcopy(state_dict)
    with pytest.raises(ValueError) as error:
        optimizer.load_state_dict(state_dict)
    for word in words:
        assert word in str(error.value)
    assert_same(before, snapshot(optimizer))
    assert_same(untouched, state_dict)


@pytest.mark.parametrize(("ours", "theirs"), [("EShampoo", "Shampoo"), ("Shampoo", "SOAP")])
def test_a_state_of_another_method_is_refused(ours, theirs):
    optimizer, *_ = trained(ours, [(4, 4), (3,)], 4, frequency=2)
    other, *_ = trained(theirs, [(4, 4), (3,)], 4, seed=1, frequency=2)
    refused(optimizer, other.state_dict(), ours, theirs)


REFUSED = {
    "other shapes": ([(4, 5), (3,)], {}, "shape (4, 4)"),
    "another order of parameters": ([(3,), (4, 4)], {}, "shape (4, 4)"),
    "another max_dim": ([(4, 4), (3,)], {"max_dim": 3}, "max_dim"),
    "merging": ([(4, 4), (3,)], {"merge_dims": True}, "merge_dims"),
    "full vectors": ([(4, 4), (3,)], {"vectors": "full"}, "vectors"),
    "matrices under Adam": ([(4, 4), (3,)], {"matrices": "adam"}, "matrices"),
    "the optimal correction": ([(4, 4), (3,)], {"correction": "optimal"}, "correction"),
    "fewer parameters": ([(4, 4)], {}, "[1]"),
}


@pytest.mark.parametrize(("shapes", "options", "word"), REFUSED.values(), ids=REFUSED)
def test_a_state_that_does_not_fit_is_refused_with_everything_unchanged(shapes, options, word):
    optimizer, *_ = trained("EShampoo", [(4, 4), (3,)], 4, frequency=2)
    other, *_ = trained("EShampoo", shapes, 4, seed=1, frequency=2, **options)
    refused(optimizer, other.state_dict(), word)


def test_other_groups_are_refused():
    params = parameters([torch.ones(4, 4), torch.ones(3)])
    one, two = EShampoo(params), EShampoo([{"params": [p]} for p in params])
    refused(one, two.state_dict(), "[1, 1]", "[2]")
    refused(two, one.state_dict(), "[1, 1]", "[2]")


def test_a_state_of_another_optimizer_or_of_other_shapes_of_adamw_is_refused():
    optimizer, params, grads = trained("EShampoo", [(4, 4), (3,)], 4)
    sgd = torch.optim.SGD(params, 0.1, momentum=0.9)
    run(sgd, params, grads[:1])
    refused(optimizer, sgd.state_dict(), "momentum", "AdamW")
    amsgrad = torch.optim.AdamW(params, amsgrad=True)
    run(amsgrad, params, grads[:1])
    refused(optimizer, amsgrad.state_dict(), "max_exp_avg_sq")
    others = parameters([torch.ones(4, 5), torch.ones(3)])
    adamw = torch.optim.AdamW(others)
    run(adamw, others, [[torch.ones(4, 5), torch.ones(3)]])
    refused(optimizer, adamw.state_dict(), "(4, 5)", "(4, 4)")
    for optimizer_class in (KLShampoo, FullMatrixAdam):
        options = {"correction": "optimal"} if optimizer_class is FullMatrixAdam else {}
        adamw = torch.optim.AdamW(params)
        run(adamw, params, grads[:1])
        refused(optimizer_class(params, **options), adamw.state_dict(), "second moment")


@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_of_sgd_without_momentum_is_refused(steps):
    optimizer, params, grads = trained("EShampoo", [(4, 4), (3,)], 4)
    sgd = torch.optim.SGD(params, 0.1)
    run(sgd, params, grads[:steps])
    refused(optimizer, sgd.state_dict(), "AdamW")


def test_a_state_of_adam_without_decay_or_of_adamw_is_taken_without_a_word(recwarn):
    for theirs, decay in ((torch.optim.Adam, 0.0), (torch.optim.AdamW, 0.1)):
        optimizer, params, grads = trained("EShampoo", [(4, 4), (3,)], 4)
        other = theirs(params, weight_decay=decay)
        run(other, params, grads[:2])
        optimizer.load_state_dict(other.state_dict())
    assert not recwarn.list


def test_a_bad_value_in_a_saved_group_is_refused():
    optimizer, *_ = trained("EShampoo", [(4, 4)], 4)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["frequency"] = 0
    refused(optimizer, saved, "frequency=0")


def everything(optimizer):
    """What a call that fails must leave alone, with the hyperparameters as the step reads them."""
    return snapshot(optimizer), optimizer._options(), optimizer.basis_report()


@pytest.mark.parametrize("what", ["a warning that is an error", "no memory", "no memory later"])
def test_loading_changes_nothing_if_it_fails_while_it_checks(what, monkeypatch):
    tensors, grads = problem([(12,), (5,)], 4)
    params, others = parameters(tensors), parameters(tensors)
    optimizer, other = EShampoo(params, lr=0.3), torch.optim.AdamW(others, lr=0.7, eps=0.1)
    run(optimizer, params, grads[:3])
    run(other, others, grads)
    before = everything(optimizer)

    def full(*_):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error" if what == "a warning that is an error" else "ignore")
        if what == "no memory":
            patch.setattr("eshampoo.validate.check_groups", full)
        elif what == "no memory later":
            patch.setattr(torch, "aminmax", full)
        with pytest.raises((UserWarning, MemoryError), match=r"no memory|nothing here has a basis"):
            optimizer.load_state_dict(other.state_dict())
    assert_same(before, everything(optimizer))
    with pytest.warns(UserWarning, match="nothing here has a basis"):
        optimizer.load_state_dict(other.state_dict())  # the same state, once nothing is in its way
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert optimizer.state[params[0]]["step"] == 4


# Schedules, hooks and names -----------------------------------------------------------------------


def test_a_schedule_of_tau_survives_loading_and_is_no_code_in_the_file():
    tau = schedules.piecewise((5,), (0.0, 1.0))
    options = {"frequency": 1, "merge_dims": False, "tau": tau}
    optimizer, params, grads = trained("EShampoo", [(4, 4)], 3, **options)
    saved = through_a_file(optimizer.state_dict())
    assert optimizer.param_groups[0]["tau"] is tau
    resumed = EShampoo(params, **options)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["tau"] == tau
    run(resumed, params, grads + grads)
    assert [r.computations for r in resumed.basis_report()] == [4, 4]


def test_a_state_with_a_schedule_loads_where_tau_is_a_number():
    params = parameters([torch.ones(4, 4)])
    saved = EShampoo(params, tau=schedules.constant(0.3)).state_dict()
    optimizer = EShampoo(params, tau=0.2)
    optimizer.load_state_dict(through_a_file(saved))
    assert optimizer.param_groups[0]["tau"] == 0.2


def test_loading_copies_what_it_takes():
    params = parameters([torch.ones(4, 4)])
    optimizer, other = (EShampoo(params, lr=torch.tensor(lr)) for lr in (0.1, 0.2))
    other.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"].fill_(0.7)
    assert other.param_groups[0]["lr"].item() == pytest.approx(0.1)


def test_the_hyperparameters_of_the_state_are_taken():
    params = parameters([torch.ones(4, 4), torch.ones(3)])
    groups = [{"params": params[:1], "lr": 0.5, "tau": 0.3}, {"params": params[1:], "kind": "v"}]
    saved = EShampoo(groups, betas=(0.1, 0.2), frequency=7).state_dict()
    optimizer = EShampoo([{"params": [p]} for p in params])
    optimizer.load_state_dict(state_dict=through_a_file(saved))
    first, second = optimizer.param_groups
    assert (first["lr"], first["tau"], first["betas"], first["frequency"]) == (
        0.5, 0.3, (0.1, 0.2), 7
    )  # fmt: skip
    assert (second["lr"], second["kind"]) == (1e-3, "v")
    assert first["params"][0] is params[0]


def test_the_hooks_of_loading_and_saving_run():
    optimizer, params, _ = trained("EShampoo", [(4, 4)], 3)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda o, s: seen.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before saving", "after saving", "before loading", "after loading"]

    def other_lr(_, state_dict):
        groups = [{**group, "lr": 0.25} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    other = EShampoo(params)
    other.register_load_state_dict_pre_hook(other_lr)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == 0.25


def test_a_hook_may_write_an_entry_of_the_library():
    optimizer, params, _ = trained("EShampoo", [(4, 4)], 3)
    zeros = torch.zeros_like(optimizer.state[params[0]]["exp_avg"])
    optimizer.register_state_dict_pre_hook(lambda o: o.state[params[0]].update(exp_avg=zeros))
    assert not optimizer.state_dict()["state"][0]["exp_avg"].any()


def test_a_state_whose_step_is_a_number_loads():
    optimizer, params, grads = trained("EShampoo", [(4, 4), (3,)], 5, frequency=3)
    twin = copy.deepcopy(params)
    saved = copy.deepcopy(optimizer.state_dict())
    for entries in saved["state"].values():
        entries["step"] = int(entries["step"].sum())
    resumed = EShampoo(twin, frequency=3)
    resumed.load_state_dict(saved)
    run(optimizer, params, grads)
    run(resumed, twin, grads)
    assert_same([p.detach() for p in params], [p.detach() for p in twin])


@pytest.mark.parametrize("step", [float("nan"), -1, True])
def test_a_step_that_no_run_can_have_is_refused(step):
    optimizer, *_ = trained("EShampoo", [(4, 4)], 2)
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = step
    refused(optimizer, saved, "'step'", "shape (4, 4)")
