"""A rehearsal of a release: build, look inside, install into empty environments, run.

    make release-check                 # or: python .ci/release_check.py [--no-tests]

It needs `build` and `twine` beside what the tests need. Torch comes from constraints.txt.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
IN_SDIST = (
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", "README.md", "constraints.txt",
    "docs/how.md", "examples/train_plain.py", "mkdocs.yml", "pyproject.toml",
    "results/digits-vit-small.jsonl.gz", "tests/keyword_table.py",
    "tests/fixtures/gold/soap_f10.npz",
)  # fmt: skip
# A checkout on PYTHONPATH would stand in for what is installed.
CLEAN = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
IN_WHEEL = ("eshampoo/py.typed", "eshampoo/lab/cli.py", "eshampoo/integrations/lightning.py")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return what it printed; end with its output if it fails."""
    print("$", *(str(word).partition("\n")[0] for word in command), flush=True)
    done = subprocess.run(command, cwd=cwd, env=CLEAN, text=True, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def build() -> tuple[Path, Path]:
    """Build sdist and wheel; return them after a look inside."""
    for old in DIST.glob("eshampoo-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", DIST)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    missing = [name for name in IN_SDIST if name not in inside]
    missing += [name for name in IN_WHEEL if name not in packed]
    foreign = [name for name in packed if not re.match(r"eshampoo(/|-[\d.]+\.dist-info/)", name)]
    foreign += [name for name in inside if "__pycache__" in name or name.startswith(".venv")]
    if missing or foreign:
        sys.exit(f"missing: {missing}; not wanted: {foreign}")
    return sdist, wheel


def install(folder: Path, wheel: Path, extra: str = "") -> Path:
    """An empty environment with the wheel; returns the folder of its programs."""
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", "constraints.txt"]
    run(*pip, "torch")
    run(*pip, f"{wheel}{extra}")
    return folder / "bin"


def snippet() -> str:
    """The code of the README."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return "\n".join(blocks)


def main() -> None:
    sdist, wheel = build()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = snippet() + "\nassert opt.basis_computations > 0\n"
        for extra in ("", "[lab]"):
            programs = install(folder / f"with{extra}", wheel, extra)
            print(run(programs / "python", "-c", code, cwd=folder))
            found = run(programs / "python", "-m", "pip", "list", cwd=folder)
            if not extra and re.search(r"^(numpy|matplotlib)\b", found, re.M):
                sys.exit("the library alone has brought more than torch")
            lab = subprocess.run(
                [programs / "eshampoo", "workloads"],
                cwd=folder,
                env=CLEAN,
                text=True,
                capture_output=True,
                check=False,
            )
            if ("pip install 'eshampoo[lab]'" in lab.stderr) == bool(extra):
                sys.exit(f"eshampoo workloads said {lab.stdout}{lab.stderr}")
        if "--no-tests" not in sys.argv:
            with tarfile.open(sdist) as archive:
                archive.extractall(folder, filter="data")
            source = folder / sdist.name.removesuffix(".tar.gz")
            tests = ("-m", "pytest", "-n", "2", "-m", "not slow")
            print(run(sys.executable, *tests, cwd=source))
    print(f"ready: {sdist.name}, {wheel.name}")


if __name__ == "__main__":
    main()
