"""Worlds: processes that are started once, talk over gloo, and run one function after another.

A world has a number of ranks, and answers for a function when all of its ranks have:

    world = Ranks(4, folder)
    world.run(function, path=folder)    # function(World(rank, 4), path=folder) on every rank

Ranks are forked from a server that has imported torch, so that starting them again is cheap. If a
rank fails, the world ends and `run` raises with the traceback of every rank; the next call starts
the ranks anew.
"""

import faulthandler
import itertools
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

PATIENCE = 180.0  # seconds for one function
GRACE = 15.0  # seconds for the other ranks once one has failed
SLOW_IMPORTS = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload(SLOW_IMPORTS)


@dataclass
class World:
    """What a function knows of the world in which it runs."""

    rank: int
    size: int

    def mesh(self, *shape, names=None):
        """A mesh of all ranks."""
        names = names or ("replicate", "shard")[-len(shape or (1,)) :]
        return init_device_mesh("cpu", shape or (self.size,), mesh_dim_names=names)


class RankError(Exception):
    """A function failed on some rank."""


class Answer(NamedTuple):
    """How a function ended on one rank; no trouble: it returned what was found."""

    trouble: str | None = None
    found: object = None


def serve(rank, size, store, stack, pipe):
    """The life of one rank: run what comes through the pipe, until it is closed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=60),
        )
        while (task := received(pipe)) is not None:
            try:
                function, arguments = pickle.loads(task)
                torch.manual_seed(0)
                answer = Answer(found=function(World(rank, size), **arguments))
            except BaseException:
                # The rank leaves, which the others notice at once: nobody waits for a timeout.
                pipe.send(Answer(traceback.format_exc()))
                os._exit(1)
            pipe.send(answer)
    os._exit(0)


def received(pipe):
    """What comes next through a pipe; None once it is closed."""
    try:
        return pipe.recv_bytes()
    except EOFError:
        return None


class Ranks:
    """The ranks of one world, seen from outside; they start with the first call of `run`."""

    def __init__(self, size, folder, patience=PATIENCE):
        self.size, self.folder, self.patience = size, folder, patience
        self.processes, self.pipes, self.stacks = [], [], []
        self.starts = itertools.count()

    def start(self):
        number = next(self.starts)
        store = self.folder / f"store-{self.size}-{number}"
        for rank in range(self.size):
            stack = self.folder / f"stack-{self.size}-{number}-{rank}"
            ours, theirs = forkserver.Pipe()
            process = forkserver.Process(
                target=serve, args=(rank, self.size, store, stack, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
            self.stacks.append(stack)

    def stop(self):
        """End all ranks, whatever they are doing."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes, self.stacks = [], [], []

    def run(self, function, ends=False, **arguments):
        """Call a function on every rank; what it returned on rank 0.

        With `ends` the function must end every rank, by code 0, instead of returning.
        """
        if not self.processes:
            self.start()
        task = pickle.dumps((function, arguments))
        for pipe in self.pipes:
            with suppress(BrokenPipeError):  # of a rank that has died; it will not answer either
                pipe.send_bytes(task)
        answers = self._answers()
        wrong = any(answer.trouble != (ENDED if ends else None) for answer in answers.values())
        if wrong or ends:
            self.stop()
        if wrong:
            told = [
                f"rank {rank} of {self.size}: {answers[rank].trouble or 'returned'}"
                for rank in range(self.size)
            ]
            raise RankError("\n".join([f"{function.__name__} failed", *told]))
        return answers[0].found

    def _answers(self):
        answers, waiting = {}, dict(zip(self.pipes, range(self.size), strict=True))
        deadline = time.monotonic() + self.patience
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                rank = waiting.pop(pipe)
                answers[rank] = self._answer(rank)
                if answers[rank].trouble not in (None, ENDED):
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in waiting.values():
            answers[rank] = Answer(f"hangs\n{self._stack(rank)}")
        return answers

    def _answer(self, rank):
        try:
            return self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            process = self.processes[rank]
            process.join()
            return Answer(f"ended with code {process.exitcode}")

    def _stack(self, rank):
        """Where a rank is that does not answer."""
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.stacks[rank].read_text()


ENDED = "ended with code 0"
