"""Rules of the house that a reader relies on: names in comments exist, nothing is too long, rooms
have doors and no cycles."""

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

import torch

import eshampoo

ROOT = Path(eshampoo.__file__).parents[1]
PACKAGE = ROOT / "eshampoo"
LONGEST_FUNCTION, LONGEST_FILE, LONGEST_TEST = 50, 350, 500

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


# Sizes --------------------------------------------------------------------------------------------


def test_no_function_is_longer_than_a_screen():
    offenders = [
        f"{place(path, node.lineno)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path, (_, tree) in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
    ]
    assert not offenders, listed(offenders)


def test_no_file_is_too_long_to_read():
    lengths = {path: text.count("\n") for path, (text, _) in sources().items()}
    offenders = [f"{place(p, 1)}: {n} lines" for p, n in lengths.items() if n > LONGEST_FILE]
    tests = {path: path.read_text().count("\n") for path in (ROOT / "tests").rglob("test_*.py")}
    offenders += [f"{place(p, 1)}: {n} lines" for p, n in tests.items() if n > LONGEST_TEST]
    assert not offenders, listed(offenders)


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
    """Everything outside functions: what runs on import, and what stands under TYPE_CHECKING."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
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
PRIVATE = {PACKAGE / "math" / "foreach.py", PACKAGE / "ranks" / "torch_names.py"}


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


def test_private_names_of_torch_stand_in_two_files():
    found = {path: [*private_names(tree)] for path, (_, tree) in sources().items()}
    assert all(found[path] for path in PRIVATE)
    offenders = [
        f"{place(path, line)}: {name}"
        for path, names in found.items()
        for line, name in names
        if path not in PRIVATE
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
