"""The benchmark's own arithmetic, and a run of seconds."""

import json
import re
from importlib import import_module
from math import prod
from pathlib import Path

import pytest
import torch
from counting import count

import eshampoo
from benchmarks import (
    bars,
    beside,
    costs,
    environment,
    even,
    gpu,
    launches,
    limit,
    predicted,
    run,
    shapes,
    timing,
)
from benchmarks.claims import paper_hours
from eshampoo import EShampoo
from eshampoo.lab.figures.paper import PAPER_FIGURES
from eshampoo.math import solvers

SMALL = ["--shapes", "layers:8:2"]
# Entry points that no other test runs, with the arguments of a run of seconds, and what they print.
QUICK = {
    "even": ([*SMALL, "--steps", "2"], "| frequency=10 |"),
    "large": (["--only", "lean", "--model", "layers:8:2", "--steps", "1"], '"seconds"'),
    "overhead": (["--workloads", "digits-vit", "--steps", "40"], "digits-vit"),
    "ownership": (["vit_64", "2"], "largest owner cost / mean"),
    "claims.correction": (["--seeds", "1", "--steps", "12", "--lr", "1e-2"], "spread aware"),
    "claims.jacobi": (["--steps", "8", "--ways", "power", "1"], "power: criterion"),
    "claims.level": (["--seeds", "1", "--steps", "2"], "4096 u λ_max"),
    "claims.many": (["--counts", "4"], "| 4 | ratio |"),
    "claims.memory": ([*SMALL, "--repetitions", "1"], '| lean, sides="right" |'),
    "claims.null_space": (
        ["--seeds", "2", "--steps", "2", "--setting", "ε = 1e-10", "--rules", "floor 64", "aware"],
        "| floor 64 |",
    ),
    "claims.precision": (["--seeds", "2", "--steps", "2", "--bits", "24", "7"], "7 bits: "),
    "claims.vocabulary": (["--shape", "64", "4", "--repetitions", "1"], "bytes per parameter: "),
}
CLAIMS = Path(environment.HERE, "claims")


def test_the_models_have_the_sizes_that_they_are_named_for():
    millions = {name: sum(map(prod, shapes.named(name))) / 1e6 for name in shapes.MODELS}
    assert millions["vit_s"] == pytest.approx(21.5, abs=0.1)
    assert millions["vit_192"] == pytest.approx(2.8, abs=0.1)
    assert millions["vit_64"] == pytest.approx(0.21, abs=0.01)


def test_every_optimizer_gets_the_same_new_gradients():
    a, b = shapes.parameters("vit_64"), shapes.parameters("vit_64")
    first = [p.grad.clone() for p in a]
    renew_a, renew_b = shapes.renewer(a), shapes.renewer(b)
    for p in a:
        p.grad.zero_()
        p.grad = None
    renew_a()
    renew_b()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(a, b, strict=True))
    assert not any(torch.equal(p.grad, G) for p, G in zip(a, first, strict=True))


def test_the_limit_has_as_many_products_as_the_units_say():
    X = torch.zeros(1536, 384)
    found = limit.blocks([X, torch.zeros(384)])
    assert [shape for shape, _ in found] == [(1024, 384), (512, 384)]
    units = sum(m * n * (m + n) for m, n in ((1024, 384), (512, 384)))
    assert limit.multiply_adds(found, 3) == 3 * units
    for kind in (limit.Limit, limit.StackedLimit):
        products = kind(found, 3).products
        assert sum(prod(out.shape) * left.shape[-1] for out, left, _ in products) == 3 * units


def test_views_of_one_stack_count_once():
    p = torch.zeros(4)
    stack = torch.zeros(10)
    state = {p: {"a": stack[:5], "b": [stack[5:], p]}}
    assert timing.state_bytes(state, [p]) == 40


def test_a_bar_that_was_not_measured_says_so():
    assert {bar.verdict for bar in bars.all_bars(bars.Results([]))} == {"not measured"}
    assert bars.Bar("x", 1.2, 1.0, 0.5).verdict == "missed by 20%"
    assert bars.Bar("x", 0.9, 1.0, 0.5).verdict == "pass"


@pytest.mark.parametrize(("frequency", "criterion"), [(10**9, 0.0), (1, 0.0), (1, 1.0)])
def test_as_many_operations_are_counted_without_values_as_with_them(frequency, criterion):
    """These blocks are so small that a CPU does not cut the work on them into pieces."""
    found = launches.launches("layers:40:3", frequency, criterion)
    tau = 1.0 if criterion == 0 else 0.0
    params = shapes.parameters("layers:40:3")
    optimizer = EShampoo(params, frequency=frequency, tau=tau, budget=None)
    for p in params:  # of full rank: nothing is to be done for a null space
        p.grad[:] = torch.eye(40) if p.dim() == 2 else 1.0
    counts = count(optimizer.step)
    names = [name.split(".")[1] for name in counts.operations if name.startswith("aten.")]
    assert found.operations == sum(name not in launches.EMPTY for name in names)
    assert (found.products, found.reads) == (counts.products, len(counts.reads))
    assert found.decompositions == counts.times("_linalg_eigh") == criterion


@pytest.mark.slow
def test_a_quick_run_measures_and_writes(tmp_path, capsys):
    words = ["--quick", "--threads", "1", "--only", " eshampoo, soap, muon,partial,even"]
    assert run.main([*words, "--output", str(tmp_path)]) == 0
    cases = json.loads((tmp_path / "results.json").read_text())["cases"]
    assert len(cases) == 5
    assert "muon" in {case["spec"].get("contender") for case in cases}
    assert all(case["result"]["threads"] == 1 for case in cases)
    assert cases[-2]["result"]["refreshed"] == {"eigh": 1.0, "partial": 1.0}
    for way in even.WAYS:
        found = cases[-1]["result"][way]
        assert 0 < found["median"] <= found["largest"] < found["sum"]
        assert found["bases"] > 0
    assert "EShampoo plain step / 3-unit limit, 64×4" in capsys.readouterr().out


def test_the_costs_of_bases_are_printed_with_the_line_that_sets_them(capsys, monkeypatch):
    assert gpu.main(["--device", "cpu", "--sizes", "8,16", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert torch.__version__ in lines[0]
    rows = [line.split("|")[1:-1] for line in lines if line.startswith(("| 8 ", "| 16 "))]
    assert [(int(row[0]), int(row[1])) for row in rows] == [
        (d, stack) for d in (8, 16) for stack in (1, 8, 64)
    ]
    for row in rows:
        product, eigh, in_products = (float(cell) for cell in row[2:5])
        assert in_products == pytest.approx(eigh / product, rel=0.02, abs=0.51)
    monkeypatch.setattr(solvers, "EIGH_PRODUCTS", dict(solvers.EIGH_PRODUCTS))
    exec(lines[-1].strip(), {"eshampoo": eshampoo})
    between = sorted(int(row[4]) for row in rows if int(row[1]) == 64)
    assert between[0] - 1 <= solvers.eigh_cost(100) / 100**3 <= between[1] + 1


def test_a_solve_that_would_take_too_long_is_left_out():
    (one, other) = costs.measure("cpu", [16], (1, 10**5), limit=0.1, repetitions=1)
    assert one.eigh is not None
    assert (other.eigh, other.qr) == (None, None)
    assert "–" in costs.row(other)


@pytest.mark.slow
def test_the_page_of_a_gpu_is_filled_on_any_device(tmp_path):
    words = ["--device", "cpu", "--only", "layers:64:4 eshampoo", "--output", str(tmp_path)]
    words += ["--page", "--sizes", "8", "--threads", "1", "--repetitions", "1"]
    assert gpu.main(words) == 0
    page = (tmp_path / "benchmarks.md").read_text()
    assert "python -m benchmarks.gpu --device cpu" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| 64 × 4 |")]
    plain, limit_, ratio = (float(cell) for cell in row.split("|")[2:5])
    assert plain > 0
    assert limit_ > 0
    assert ratio == pytest.approx(plain / limit_, rel=0.02)


@pytest.mark.slow
def test_two_checkouts_take_the_same_steps_side_by_side(capsys):
    few = ["--only", "layers:8:1", "--seconds", "0", "--pairs", "1", "--threads", "1"]
    beside.main([str(environment.ROOT), *few])
    out = capsys.readouterr().out
    rows = [row.split() for row in out.splitlines()[1:4]]
    assert [row[1] for row in rows] == ["plain", "check", "refresh"]
    assert all(float(row[4]) > 0 for row in rows)
    assert "not the same work" not in out


def test_the_blocks_of_an_alternation_are_mirrored():
    asked = []

    class Child:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, seconds

        def ask(self, request):
            asked.append(self.name)
            seconds = [self.seconds] * request["steps"]
            return {"wall": seconds, "cpu": [2 * x for x in seconds], "bases": 1}

    children = [Child("A", 3.0), Child("B", 2.0)]
    found = [beside.Alternation.run(children, "plain", 2, 0, first) for first in (0, 1)]
    assert "".join(asked) == "ABBABAAB"
    assert found[0] == found[1] == (0, ([3.0] * 4, [2.0] * 4), ([6.0] * 4, [4.0] * 4), (2, 2))


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="no eshampoo/; name a checkout"):
        beside.main([str(tmp_path)])


def test_the_bar_of_even_steps_is_the_longest_step_of_the_default_over_the_median():
    result = {"default": {"largest": 3.0, "median": 2}, "frequency=10": {"largest": 7.0}}
    case = {"spec": {"kind": "even", "shapes": "vit_192"}, "result": result}
    found = {bar.case: bar for bar in bars.all_bars(bars.Results([case]))}
    assert found["largest / median step, 192×6"].value == 1.5


@pytest.fixture
def _same_threads():
    """Scripts set the number of threads of their process, which here is that of other tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("_same_threads")
@pytest.mark.parametrize("name", QUICK)
def test_every_script_runs_and_prints_what_it_is_for(name, capsys):
    arguments, expected = QUICK[name]
    import_module(f"benchmarks.{name}").main(arguments)
    assert expected in capsys.readouterr().out


def test_a_predicted_step_is_charged_for_its_products_bytes_and_launches():
    """One layer of 40 × 40, whose products are known: two rotations each way, and two factors."""
    work = predicted.plain_step("layers:40:1", 80)
    assert sum(w.flops for w in work) == 6 * 2 * 40**3
    assert sum(w.launches for w in work) == launches.launches("layers:40:1", 10**9).singly
    two = [predicted.Work(8.0, 2.0, 1), predicted.Work(0.0, 6.0, 3)]
    assert predicted.seconds(two, peak=2.0, bandwidth=3.0) == 4.0 + 2.0
    assert predicted.seconds(two, peak=1e9, bandwidth=1e9) == 4 * predicted.LAUNCH


def test_the_predicted_tables_are_printed(capsys):
    predicted.main("layers:40:3")
    out = capsys.readouterr().out
    assert "computed, not measured" in out
    # 3 · (40² + 40) parameters; M, D, two factors and two bases of 40² each, and a few numbers.
    assert "| layers:40:3 | 0 | 0.0 | 8.0 | 0.0 | " in out
    assert out.count("| layers:40:3 | H100 SXM |") == 1


def test_kernel_launches_are_printed(capsys):
    launches.main("layers:40:3")
    assert "| check, every basis computed |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_hours_of_a_figure_are_those_that_the_page_has():
    row = paper_hours.row_of(PAPER_FIGURES["fig4"])
    assert row in (environment.ROOT / "docs" / "reproduction.md").read_text()


def test_every_claim_has_its_command_and_its_figure_on_its_page():
    """Digits are compared, and the name of the script; words around them may change."""
    rows = [line.split("|") for line in (CLAIMS / "README.md").read_text().splitlines()]
    rows = [row for row in rows if len(row) == 6 and "python -m" in row[2]]
    for _, claim, command, figure, page, _ in rows:
        (path,) = re.findall(r"\((.*)\)", page)
        (script,) = re.findall(r"python -m (\S+?)[` ]", command)
        text = (CLAIMS / path).read_text()
        assert script in text, claim
        for number in re.findall(r"\d[\d.,]*(?:e-\d+)?", figure):
            assert number.rstrip(".,") in text, (claim, number)
    listed = {row[2].split("claims.")[1].strip("` ") for row in rows if "claims." in row[2]}
    assert listed == {path.stem for path in CLAIMS.glob("[a-z]*.py")}
