"""The examples run with the real frameworks, their runs resume bit for bit, and a page has all."""

import importlib.util
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from copy import deepcopy
from itertools import islice
from pathlib import Path

import pytest
import torch
from jobs import ALONE, EXAMPLES, ON_TWO_RANKS
from torch import nn

from eshampoo import EShampoo, name_parameters

ROOT = EXAMPLES.parent
GRACE = 5.0  # seconds for the other ranks once one has failed
NEEDS = {  # by a part of a job's name
    "trainer": "transformers",
    "peft": "peft",
    "accelerate": "accelerate",
    "torchao": "torchao",
    "lightning": "lightning",
    "timm": "timm",
    "titan_container": "torchtitan",
    "schedulefree": "schedulefree",
    "trl": "trl",
}


def needed(job):
    """The package that a job needs besides torch, if any."""
    return next((package for word, package in NEEDS.items() if word in job), None)


def is_missing(package):
    return package is not None and importlib.util.find_spec(package) is None


def with_reasons(jobs):
    """Jobs as parameters of a test, skipped where their package is not installed."""
    for job in jobs:
        package, marks = needed(job), []
        if is_missing(package):
            because = " (which needs torchvision)" if package == "timm" else ""
            marks.append(pytest.mark.skip(reason=f"{package}{because} is not installed"))
        yield pytest.param(job, marks=marks)


def selected(request, test):
    """The jobs of a test that this session runs."""
    mine = [item for item in request.session.items if getattr(item, "originalname", "") == test]
    return [
        item.callspec.params["job"]
        for item in mine
        if not is_missing(needed(item.callspec.params["job"]))
    ]


def free_ports(count):
    """The first of two neighbouring ports for each job, which nobody has.

    No connection gets them by chance before the job starts: the system gives connections ports from
    32768 on.
    """
    tried = random.sample(range(20_000, 32_000, 2), 10 * count)
    return list(islice((port for port in tried if is_free(port) and is_free(port + 1)), count))


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) != 0


def run(jobs, ranks, folder):
    """Run jobs one after another, on some ranks; the answers of each rank.

    A job that fails on one rank ends its processes; new ones go on with the next job.
    """
    answers, left = [{} for _ in range(ranks)], list(jobs)
    while left:
        found = run_to_failure(left, ranks, folder)
        answers = [old | new for old, new in zip(answers, found, strict=True)]
        good = [all(fine(mine.get(job)) for mine in found) for job in left]
        left = left[good.index(False) + 1 :] if False in good else []
    return answers


def fine(answer):
    return answer is not None and answer["trouble"] is None


def run_to_failure(jobs, ranks, folder):
    """Run jobs up to the first that fails on some rank; the answers of each rank."""
    ports = free_ports(len(jobs))
    meetings, processes = [f"{job}:{port}" for job, port in zip(jobs, ports, strict=True)], []
    paths = [folder / f"answers-{len(jobs)}-{rank}.json" for rank in range(ranks)]
    for rank, path in enumerate(paths):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment = {
            **os.environ,
            **({key: str(value) for key, value in world.items()} if ranks > 1 else {}),
            "MASTER_ADDR": "localhost",
            "TORCHELASTIC_RUN_ID": "recipes",  # as under torchrun, which Lightning asks for
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, str(Path(__file__).with_name("jobs.py")), str(path), *meetings]
        with open(path.with_suffix(".log"), "w") as log:
            process = subprocess.Popen(
                command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT
            )
        processes.append(process)
    wait_for(processes)
    return [answers_of(path, jobs) for path in paths]


def wait_for(processes):
    """Wait until all have ended; once one has failed, the others get a moment."""
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                time.sleep(GRACE)
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()


def answers_of(path, jobs):
    """The answers of one rank; for the job at which it ended without any, its last words."""
    answers = json.loads(path.read_text()) if path.exists() else {}
    unanswered = [job for job in jobs if job not in answers]
    if unanswered and all(map(fine, answers.values())):
        log = path.with_suffix(".log").read_text()
        answers[unanswered[0]] = {"found": None, "trouble": f"no answer\n{log[-4000:]}"}
    return answers


@pytest.fixture(scope="session")
def alone(request, tmp_path_factory):
    jobs = selected(request, "test_with_the_real_package")
    return run(jobs, 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="session")
def together(request, tmp_path_factory):
    jobs = selected(request, "test_with_the_real_package_on_two_ranks")
    return run(jobs, 2, tmp_path_factory.mktemp("together"))


def check(job, answers):
    """No rank had trouble, and where losses were printed, they fell."""
    for rank, answer in enumerate(answers):
        trouble = answer[job]["trouble"] if job in answer else "ended when another rank failed"
        assert trouble is None, f"rank {rank}: {trouble}"
    if job.startswith("train_"):
        losses = re.findall(r"loss ([\d.]+) -> ([\d.]+)", answers[0][job]["found"])
        assert losses
        for first, last in losses:
            assert float(last) < 0.9 * float(first)


@pytest.mark.slow
@pytest.mark.parametrize("job", [*with_reasons(ALONE)])
def test_with_the_real_package(job, alone):
    check(job, alone)


@pytest.mark.slow
@pytest.mark.parametrize("job", [*with_reasons(ON_TWO_RANKS)])
def test_with_the_real_package_on_two_ranks(job, together):
    check(job, together)


# Conventions of packages that cannot be run here --------------------------------------------------


def test_the_groups_and_keywords_of_timm_are_taken():
    """As timm 1.0.30 builds an optimizer with layer decay: groups have `lr_scale`."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    groups = [
        {"lr_scale": 0.5, "weight_decay": 0.0, "params": [model[0].bias, model[1].bias]},
        {"lr_scale": 1.0, "weight_decay": 0.05, "params": [model[0].weight, model[1].weight]},
    ]
    optimizer = EShampoo(groups, weight_decay=0.0, lr=1e-3, eps=1e-8, betas=(0.9, 0.99))
    name_parameters(optimizer, model)
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.05]
    assert {report.name for report in optimizer.basis_report()} == {"0.weight", "1.weight"}


def test_an_optimizer_for_every_parameter_does_what_one_for_all_does():
    """As torchao's offload builds them: `params` of a group is a single tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).double()
    twin = deepcopy(model)
    keywords = {"lr": 1e-2, "frequency": 2, "tau": 0.0}
    several = [EShampoo([{"params": p}], **keywords) for p in model.parameters()]
    one = EShampoo(twin.parameters(), **keywords)
    for _ in range(8):
        x = torch.randn(32, 8, dtype=torch.double)
        for net, optimizers in ((model, several), (twin, [one])):
            net.zero_grad()
            (net(x) - x.roll(1, 1)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


# The page -----------------------------------------------------------------------------------------


def test_every_example_is_on_the_page_of_recipes():
    page = (ROOT / "docs" / "recipes.md").read_text()
    linked = set(re.findall(r"\]\(\.\./examples/([\w.]+)\)", page)) - {"README.md"}
    assert linked == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
