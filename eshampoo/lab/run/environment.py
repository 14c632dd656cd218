"""What a result depends on besides the run: versions and machine."""

import os
import platform
from pathlib import Path

import numpy as np
import torch

import eshampoo


def environment() -> dict[str, str | int]:
    """Return the versions of what computes, the processor and the number of threads."""
    return {
        "eshampoo": eshampoo.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def processor() -> str:
    """Return the processor's name, if the system knows it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
