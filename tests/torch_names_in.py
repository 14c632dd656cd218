"""Which private names of torch, of those that eshampoo uses, a version of torch does not have.

    python tests/torch_names_in.py WHEEL …

It reads wheels without installing them: `pip download --no-deps` also takes those of other
platforms, so a version can be looked at that this machine cannot run.
"""

import ast
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "eshampoo"
# Operators of `torch` are written in C++; Python sees them in this file.
OPERATORS = "torch/_C/_VariableFunctions.pyi"


def private_names() -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names, and the files of torch one of which must define them."""
    for node in ast.walk(ast.parse((PACKAGE / "torch_names.py").read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name.startswith("_"):
                yield name, (OPERATORS, "torch/__init__.py")
            case ast.Attribute(value=ast.Name(id="mesh"), attr=name) if name.startswith("_"):
                yield name, ("torch/distributed/device_mesh.py",)
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                file = f"{module.replace('.', '/')}.py"
                yield from ((name.name, (file,)) for name in names if name.name.startswith("_"))
    for name in set(re.findall(r"self\.(_optimizer_\w+)", (PACKAGE / "optimizer.py").read_text())):
        yield name, ("torch/optim/optimizer.py",)


def missing(read: Callable[[str], str]) -> list[str]:
    """The names that no file defines or imports; `read` returns the text of a file, or ""."""
    texts = {name: "\n".join(map(read, files)) for name, files in private_names()}
    defined = r"(def|class) {0}\b|import .*\b{0}\b|\b{0}\s*[,:=]"
    return [name for name, text in texts.items() if not re.search(defined.format(name), text)]


def in_wheel(path: str) -> list[str]:
    """The names that a wheel does not have."""
    with zipfile.ZipFile(path) as wheel:
        present = set(wheel.namelist())
        return missing(lambda file: wheel.read(file).decode() if file in present else "")


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(f"{Path(path).name}: {', '.join(in_wheel(path)) or 'has all names'}")
