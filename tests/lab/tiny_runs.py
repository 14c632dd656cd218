"""Runs of a second, for the tests of the loop and of its log."""

import inspect

from eshampoo.lab.catalogue import WORKLOADS, setting
from eshampoo.lab.optimizers import OPTIMIZERS
from eshampoo.lab.run.runlog import FILE_NAME, read_log
from eshampoo.lab.run.training import train


def trained(run, out, data=None, **keywords):
    """Train a run into a directory, and read its log."""
    out.mkdir(parents=True, exist_ok=True)
    train(run, setting(run).data(data), out, **keywords)
    return read_log(out / FILE_NAME)


def tiny(optimizer, steps=24, workload="digits-vit", **options):
    """A run of the tiny scale; matrices stay matrices, however small, where that can be chosen."""
    keywords = inspect.signature(OPTIMIZERS[optimizer]).parameters
    defaults = {"frequency": 4, "merge_dims": False}
    options = {key: defaults[key] for key in defaults if key in keywords} | options
    return WORKLOADS[workload].run(optimizer, options, scale="tiny", steps=steps)
