"""Runs of a second, for the tests of the loop and of its log."""

from eshampoo.lab.catalogue import WORKLOADS, setting
from eshampoo.lab.run.runlog import FILE_NAME, read_log
from eshampoo.lab.run.training import train


def trained(run, out, data=None, **keywords):
    out.mkdir(parents=True, exist_ok=True)
    train(run, setting(run).data(data), out, **keywords)
    return read_log(out / FILE_NAME)


def tiny(optimizer, steps=24, workload="digits-vit", **options):
    if optimizer != "adamw":
        # tiny matrices stay matrices
        options = {"frequency": 4, "merge_dims": False, **options}
    return WORKLOADS[workload].run(optimizer, options, scale="tiny", steps=steps)
