"""A test that holds the house: how much there is to read, how far a gradient walks, one meaning per
name, names in comments that exist, rooms with doors and no cycles.

A number here may only be raised with a sentence beside it that says what the reader gets for it.
"""

import ast
import builtins
import graphlib
import importlib
import io
import itertools
import keyword
import re
import sys
import tokenize
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.tensor  # a name that comments use

import eshampoo
from eshampoo.classes import CLASSES

ROOT = Path(eshampoo.__file__).parents[1]
PACKAGE = ROOT / "eshampoo"

# What there is to read outside the lab: lines of code, files, and the lines of a function.
LINES, FILES, LONGEST_FUNCTION = 3600, 40, 50
# How often the way of one matrix crosses from file to file, in a step without a check of its
# bases, in one with a check, and when a state is loaded.
PLAIN, CHECK, LOAD = 20, 45, 50
# Names that modules outside the lab may share: type variables, a row of the table and its class,
# and a callback that has the same name for every framework.
SHARED = {"T", "P", "CASPR", "SOAP", "LogBases"}

# Words in backticks that are no names of ours, of Python or of torch.
ALLOWED = {"DIR", "make", "python", "true"}


@cache
def sources():
    """Every file of the package with its text and its tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        found[path] = text, ast.parse(text)
    return found


def in_lab(path):
    return (PACKAGE / "lab") in path.parents


def place(path, line):
    return f"{path.relative_to(ROOT)}:{line}"


def listed(offenders):
    """For the message of an assertion."""
    return "\n" + "\n".join(offenders)


# Names in backticks -------------------------------------------------------------------------------


def remarks(text, tree):
    """The comments and docstrings of a file, also those of attributes, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(remark))):
                yield node.lineno, remark


def quoted(text, tree):
    """What stands between backticks, with its line."""
    for line, remark in remarks(text, tree):
        for match in re.finditer(r"`+([^`]+)`+", remark):
            yield line + remark.count("\n", 0, match.start()), match[1]


def names_in(code):
    """Dotted names in a piece of code or a command; what stands in quotes is left out."""
    return re.findall(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*", re.sub(r"\"[^\"]*\"|'[^']*'", "", code))


def defined_in(tree):
    """Every name that a file defines: functions, classes, attributes, variables, parameters,
    keywords of calls, and strings that could be keys."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(asname=str(name)):
                yield name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Constant(value=str(name)) if name.replace("-", "_").isidentifier():
                yield name


@cache
def vocabulary():
    """All names of the package, and the members of its modules and classes."""
    names, scopes = set(), {}
    for path, (_, tree) in sources().items():
        names |= {path.stem, path.name, path.parent.name, *defined_in(tree)}
        scopes.setdefault(path.stem, set()).update(defined_at_top(tree))
        scopes.setdefault(path.parent.name, set()).update({path.stem, *defined_at_top(tree)})
        scopes.setdefault(path.parent.parent.name, set()).add(path.parent.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                scopes.setdefault(node.name, set()).update(defined_in(node), inherited(node))
    return names, scopes


def defined_at_top(tree):
    """What a module offers to those who import it."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign() | ast.AnnAssign():
                yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name) for alias in node.names)


def inherited(node):
    """Members of a class that come from outside the package."""
    outside = {"Optimizer": torch.optim.Optimizer, "Module": torch.nn.Module}
    for base in node.bases:
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        yield from dir(outside.get(name, object))


@cache
def of_torch():
    """Public names of torch that code here uses by themselves, and methods of its objects."""
    spaces = (torch, torch.nn, torch.optim, torch.distributed, torch.linalg)
    kinds = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, dict, list, str)
    return {name for space in (*spaces, *kinds) for name in dir(space)}


def elsewhere(dotted):
    """Whether a dotted name leads from torch or the standard library to something."""
    first, *rest = dotted.split(".")
    start = {"torch": "torch", "nn": "torch.nn", "dist": "torch.distributed"}.get(first, first)
    if not rest or (start == first != "torch" and first not in sys.stdlib_module_names):
        return False
    thing = importlib.import_module(start)
    for name in rest:
        thing = getattr(thing, name, None)
    return thing is not None


def exists(dotted):
    names, scopes = vocabulary()
    parts = dotted.split(".")
    if dotted in names or elsewhere(dotted):  # `engine.py` is one name
        return True
    if parts[-1] == "py" or parts[0] == "torch":
        return False
    inside = itertools.pairwise(parts)
    if any(outer in scopes and inner not in scopes[outer] for outer, inner in inside):
        return False
    plain = names | of_torch() | {*dir(builtins), *keyword.kwlist} | ALLOWED
    return all(part in plain or len(part) == 1 for part in parts)


def test_every_name_in_backticks_exists():
    offenders = [
        f"{place(path, line)}: {name}"
        for path, (text, tree) in sources().items()
        for line, code in quoted(text, tree)
        for name in names_in(code)
        if not exists(name)
    ]
    assert not offenders, listed(offenders)


def test_a_name_that_does_not_exist_is_found():
    for name in ("EShampoo", "schedules.linear", "torch.optim.AdamW", "nn.Linear", "max_dim"):
        assert exists(name), name
    for name in ("EShampooing", "schedules.cubic", "torch.optim.AdamX", "gone.py"):
        assert not exists(name), name


# How much there is to read ------------------------------------------------------------------------


def core():
    """The files outside the lab."""
    return {path: source for path, source in sources().items() if not in_lab(path)}


def lines_of_code(text, tree):
    """Lines that are not empty, no comment and in no docstring."""
    documented = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(number not in documented and line[:1] not in ("", "#") for number, line in lines)


def test_the_core_fits_in_one_head():
    lines = {place(path, 1): lines_of_code(*source) for path, source in core().items()}
    longest = sorted(lines, key=lines.get, reverse=True)[:8]
    assert sum(lines.values()) <= LINES, (sum(lines.values()), {n: lines[n] for n in longest})
    assert len(lines) <= FILES, len(lines)


def test_a_line_of_code_is_counted_as_one():
    text = '"""Docs."""\n\n# Why.\ndef f():\n    """More\n    docs."""\n    return "#"  # so\n'
    assert lines_of_code(text, ast.parse(text)) == 2


def test_no_function_is_longer_than_a_screen():
    offenders = [
        f"{place(path, node.lineno)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, (_, tree) in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert not offenders, listed(offenders)


def named_at_top(tree):
    """Functions, classes, constants and types that a module defines for itself."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                stored = (n for target in targets for n in ast.walk(target))
                yield from (n.id for n in stored if isinstance(n, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def test_no_name_has_two_meanings():
    places = {}
    for path, (_, tree) in core().items():
        for name in {*named_at_top(tree)} - SHARED:
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    offenders = [f"{name}: {', '.join(own)}" for name, own in places.items() if len(own) > 1]
    assert not offenders, listed(offenders)


# How far a gradient walks -------------------------------------------------------------------------

WALKERS = {cls.__name__: cls for cls in CLASSES}


def walked(action):
    """The functions of ours that are called, each with its file; comprehensions and lambdas belong
    to the function that holds them."""
    calls = []

    def see(frame, event, _):
        code = frame.f_code
        ours = event == "call" and code.co_filename.startswith(str(PACKAGE))
        if ours and not code.co_name.startswith("<"):
            calls.append((str(Path(code.co_filename).relative_to(PACKAGE)), code.co_name))

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


def crossings(calls):
    return sum(one != other for (one, _), (other, _) in itertools.pairwise(calls))


def told(calls):
    """A walk, for the message of an assertion: the functions of each file that it comes to."""
    runs = itertools.groupby(calls, key=lambda call: call[0])
    return listed(f"{file}: {' '.join(name for _, name in run)}" for file, run in runs)


def one_matrix(method):
    """An optimizer with one matrix, and the matrix."""
    p = torch.nn.Parameter(torch.randn((6, 5) if method == "FullMatrixAdam" else (48, 40)))
    options = {} if method == "Muon" else {"frequency": 4}
    return WALKERS[method]([p], lr=1e-3, **options), p


def steps(optimizer, p, count):
    """The walks of some steps."""
    for _ in range(count):
        p.grad = torch.randn_like(p)
        yield walked(optimizer.step)


@pytest.mark.parametrize("method", WALKERS)
def test_a_step_crosses_few_files(method):
    walks = list(steps(*one_matrix(method), 8))[4:]
    checks = [calls for calls in walks if ("step/refresh.py", "refresh_") in calls]
    assert len(checks) == (method != "Muon")
    for calls in walks:
        assert crossings(calls) <= (CHECK if calls in checks else PLAIN), told(calls)


@pytest.mark.parametrize("method", WALKERS)
def test_loading_crosses_few_files(method):
    optimizer, p = one_matrix(method)
    list(steps(optimizer, p, 4))
    state, (other, _) = optimizer.state_dict(), one_matrix(method)
    calls = walked(lambda: other.load_state_dict(state))
    assert crossings(calls) <= LOAD, told(calls)


# Words that are not used --------------------------------------------------------------------------


def calls(name):
    """Where the package calls a builtin."""
    for path, (_, tree) in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == name:
                yield path, node.lineno


def test_the_library_does_not_print():
    offenders = [place(path, line) for path, line in calls("print") if not in_lab(path)]
    assert not offenders, listed(offenders)


def test_nobody_asks_whether_an_object_has_an_attribute():
    offenders = [place(path, line) for path, line in calls("hasattr")]
    assert not offenders, listed(offenders)


def test_no_module_is_a_drawer_for_everything():
    drawers = {"util", "utils", "helper", "helpers", "misc"}
    offenders = [str(p.relative_to(ROOT)) for p in sources() if drawers & {p.stem, p.parent.name}]
    assert not offenders, listed(offenders)


# Rooms --------------------------------------------------------------------------------------------


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules():
    return {module_of(path): path for path in sources()}


def imported_by(name, nodes):
    """Modules of the package that these statements of a module import."""
    path = modules()[name]
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            targets = [f"{base}.{alias.name}" for alias in node.names]
            targets = [target if target in modules() else base for target in targets]
        else:
            continue
        yield from (target for target in targets if target in modules())


def at_module_level(tree):
    """Everything that runs on import: a type that only a checker of types sees may point back."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {
        name: {*imported_by(name, at_module_level(sources()[path][1]))} - {name}
        for name, path in modules().items()
    }
    assert any(graph.values())
    circle = []
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1][::-1]
    assert not circle, " imports ".join(circle)


def imports_from(inside, room):
    """Where modules that `inside` picks import a room of the package, at any level of nesting."""
    for name, path in modules().items():
        if inside(name):
            for target in imported_by(name, ast.walk(sources()[path][1])):
                if room(target):
                    yield f"{place(path, 1)}: {target}"


def within(room):
    return lambda name: name == room or name.startswith(f"{room}.")


def test_mathematics_imports_nothing_of_ours():
    room = within("eshampoo.math")
    assert any(map(room, modules())), "there is no eshampoo.math"
    offenders = [*imports_from(room, lambda target: not room(target))]
    assert not offenders, listed(offenders)


def test_the_library_does_not_import_its_lab():
    lab = within("eshampoo.lab")
    assert any(map(lab, modules()))
    offenders = [*imports_from(lambda name: not lab(name), lab)]
    assert not offenders, listed(offenders)


# Private names of torch ---------------------------------------------------------------------------

# docs/reliability.md says in which versions they are there.
PRIVATE = PACKAGE / "torch_names.py"


def private_names(tree):
    """Private names of torch that a file imports or reaches from a module, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                dotted = [f"{module}.{alias.name}" for alias in names]
            case ast.Import(names=names):
                dotted = [a.name for a in names if a.name.startswith("torch.")]
            case ast.Attribute() if ast.unparse(node).startswith(("torch.", "dist.")):
                dotted = [ast.unparse(node)]
            case _:
                continue
        yield from ((node.lineno, name) for name in dotted if re.search(r"\._[a-z]", name, re.I))


def test_private_names_of_torch_stand_in_one_file():
    found = {path: [*private_names(tree)] for path, (_, tree) in sources().items()}
    assert found[PRIVATE]
    offenders = [
        f"{place(path, line)}: {name}"
        for path, names in found.items()
        for line, name in names
        if path != PRIVATE
    ]
    assert not offenders, listed(offenders)


def test_a_private_name_of_torch_is_found():
    for code in (
        "torch._foreach_add_(xs, 1)",
        "from torch.optim.optimizer import _use_grad",
        "import torch._dynamo",
        "dist.distributed_c10d._get_default_group()",
    ):
        assert [*private_names(ast.parse(code))], code
    for code in (
        "torch.nn.Linear(2, 2)",
        "torch.Tensor.__init__",
        "self._torch",
        "from a import _b",
    ):
        assert not [*private_names(ast.parse(code))], code
