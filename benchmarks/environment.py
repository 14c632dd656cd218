"""The benchmark's own environment for the peers, and the machine that it runs on."""

import os
import platform
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TORCH = "2.13.0"


def python_with_peers() -> str:
    """The interpreter of benchmarks/.venv, which is made if it is not there."""
    folder = HERE / ".venv"
    python = folder / "bin" / "python"
    requirements = HERE / "requirements.txt"
    mark = folder / "installed.txt"
    if not mark.exists() or mark.read_text() != requirements.read_text():
        venv.create(folder, with_pip=True)
        subprocess.run(
            [
                *(str(python), "-m", "pip", "install", "--quiet"),
                *("-c", str(HERE / "constraints.txt"), "-r", str(requirements)),
            ],
            check=True,
            stdout=sys.stderr,
        )
        mark.write_text(requirements.read_text())
    found = torch_version(str(python))
    if found.split("+")[0] != TORCH:
        raise RuntimeError(
            f"benchmarks/.venv has torch {found}, the cases need {TORCH}: remove benchmarks/.venv "
            "and run again"
        )
    return str(python)


def torch_version(python: str) -> str:
    """The torch of an interpreter."""
    command = [python, "-c", "import torch; print(torch.__version__)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def cpu_model() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def machine(python: str, threads: int) -> dict[str, object]:
    """What the numbers were measured on; no paths."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch_version(python),
        "load_at_start": round(os.getloadavg()[0], 2),
    }
