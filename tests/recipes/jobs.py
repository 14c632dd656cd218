"""What the tests of the recipes run in processes of their own, several jobs in each.

    python tests/recipes/jobs.py ANSWERS JOB:PORT …

Importing the frameworks takes longer than the jobs, so one process (or one per rank) runs many. A
job that fails, or takes longer than any should, is written down with its traceback, and ends the
process: another rank may wait for this one. Every job on ranks has a port, where its ranks meet, so
that it starts as under torchrun.
"""

import contextlib
import faulthandler
import importlib.util
import io
import json
import logging
import os
import runpy
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE = 150.0  # seconds for one job, which takes less than ten on a quiet machine


def example(name, *arguments):
    """A job that runs an example to its end: what it printed."""

    def job(folder):
        printed, before = io.StringIO(), sys.argv
        sys.argv = [f"{name}.py", *arguments]
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            sys.argv = before
        return printed.getvalue()

    return job


def module(name):
    """An example, to call what is in it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def weights(model):
    """Whole tensors of a model, also of one that is sharded."""
    return {
        name: (p.full_tensor() if isinstance(p, dist.tensor.DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def same(ours, theirs):
    """Two models have the same bits."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def stops_and_resumes(name):
    """A job that stops an example between two checkpoints, and starts it again."""

    def job(folder):
        said = ["--folder", str(folder), "--steps", "40"]
        first = example(name, *said, "--stop-after", "24")(folder)
        # At the port of the first run, one rank might find the other before that has left.
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        second = example(name, *said)(folder)
        if os.environ["RANK"] == "0":
            assert "step 20" in first
            assert "resumed" not in first
            assert "resumed at step 20" in second
            lines = [line.split() for line in (first + second).splitlines() if "loss" in line]
            assert float(lines[-1][-1]) < 0.8 * float(lines[0][-1])

    return job


# Trainer ------------------------------------------------------------------------------------------


def trainer_resumes(folder):
    trained = module("train_trainer")
    for make in (trained.with_an_optimizer, trained.with_a_class):
        through = make(folder / make.__name__, 16)
        through.train()
        resumed = make(folder / make.__name__, 16)
        before = weights(resumed.model)
        resumed.train(resume_from_checkpoint=str(folder / make.__name__ / "checkpoint-8"))
        after = weights(resumed.model)
        assert not any(torch.equal(before[name], after[name]) for name in before)
        same(weights(through.model), after)
        inner = [trainer.optimizer.optimizer for trainer in (through, resumed)]
        assert inner[0].basis_computations == inner[1].basis_computations > 0


def trainer_names(folder):
    trained = module("train_trainer")
    made = trained.with_a_class(folder, 2)
    made.train()
    optimizer = made.optimizer.optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    names = {name for name, p in made.model.named_parameters() if p.dim() > 1}
    assert {report.name for report in optimizer.basis_report()} == names


def trainer_logs(folder):
    """The callback logs what the report says at that step."""
    trained = module("train_trainer")
    made = trained.with_an_optimizer(folder, 40)
    made.train()
    logged = [entry for entry in made.state.log_history if "basis/checks" in entry]
    assert [entry["step"] for entry in logged] == [20, 40]
    assert logged[0]["basis/checks"] < logged[1]["basis/checks"]
    scalars = made.optimizer.optimizer.basis_report().scalars()
    assert "basis/transformer.h.attn.c_attn.weight/L/criterion" in scalars
    assert {name: logged[1][name] for name in scalars} == scalars


# Lightning ----------------------------------------------------------------------------------------


def lightning_logs(folder):
    """Every logger gets the scalars of the report, at every tenth step."""
    trained = module("train_lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for kind in (trained.Automatic, trained.Manual):
        trainer = trained.make_trainer(4, folder / kind.__name__)
        sent = []
        trainer.logger.log_metrics = lambda metrics, step, sent=sent: sent.append((step, metrics))
        trainer.fit(kind(), trained.loader())
        reports = [(step, metrics) for step, metrics in sent if "basis/checks" in metrics]
        assert [step for step, _ in reports] == [10, 20, 30]
        assert reports[0][1]["basis/net.weight/L/computations"] > 0
        assert reports[0][1]["basis/checks"] < reports[2][1]["basis/checks"]
    trainer = trained.make_trainer(5, folder / "last")
    trainer.logger.log_metrics = lambda metrics, step: sent.append((step, metrics))
    trainer.fit(trained.Automatic(), trained.loader())
    assert sent[-1] == (40, trainer.optimizers[0].basis_report().scalars())


def lightning_logs_steps(folder):
    """With accumulation, and when it continues, it logs once per interval of optimizer steps."""
    from lightning.pytorch import Trainer

    from eshampoo.integrations.lightning import LogBases

    trained = module("train_lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"default_root_dir": folder, "enable_checkpointing": False}
    sent, callback = [], LogBases(every=2)
    for _ in range(2):  # a second run starts to count again
        trainer = Trainer(accumulate_grad_batches=2, max_steps=4, callbacks=[callback], **quiet)
        trainer.logger.log_metrics = lambda metrics, step: sent.append((step, metrics))
        trainer.fit(trained.Automatic(), trained.loader())
    assert [step for step, metrics in sent if "basis/checks" in metrics] == [2, 4, 2, 4]


def lightning_resumes(folder):
    trained = module("train_lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for kind in (trained.Automatic, trained.Manual):
        through, saved = kind(), folder / kind.__name__
        trained.make_trainer(4, saved).fit(through, trained.loader())
        resumed, trainer = kind(), trained.make_trainer(4, folder / "again")
        path = saved / "epoch=1.ckpt"
        trainer.fit(resumed, trained.loader(), ckpt_path=path, weights_only=True)
        half = len(through.losses) // 2
        assert resumed.losses == through.losses[half:]
        same(weights(through), weights(resumed))
        reports = trainer.optimizers[0].basis_report()  # of the blocks that this rank owns
        assert {report.name for report in reports} <= {"net.0.weight", "net.2.weight"}
        assert all(0 < report.checks < len(through.losses) for report in reports)


# Accelerate ---------------------------------------------------------------------------------------


def accelerate_resumes(shard):
    def job(folder):
        trained = module("train_accelerate")
        through, expected = trained.train(trained.make_accelerator(shard), 40)
        forget_accelerate()
        _, first = trained.train(trained.make_accelerator(shard), 20, folder=folder)
        forget_accelerate()
        accelerator = trained.make_accelerator(shard)
        resumed, second = trained.train(accelerator, 40, start=20, folder=folder)
        assert expected[-1] < expected[0]
        assert first + second == expected
        same(weights(through), weights(resumed))
        assert accelerator.is_fsdp2 == shard
        assert all(isinstance(p, dist.tensor.DTensor) == shard for p in resumed.parameters())

    return job


def forget_accelerate():
    """The next Accelerator starts anew; otherwise all share one state."""
    state = sys.modules["accelerate.state"]
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


def accelerate_follows_fsdp2(folder):
    """Sharded by `prepare`, after the optimizer was built, as if it had been sharded before."""
    from eshampoo import EShampoo

    trained = module("train_accelerate")
    accelerator = trained.make_accelerator(shard=True)
    prepared, losses = trained.train(accelerator, 30)
    model = trained.small_model()
    dist.fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = EShampoo(model.named_parameters(), lr=1e-2)
    for step, expected in enumerate(losses):
        x, y = trained.batch(step, dist.get_rank())
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() == expected, f"step {step}"
    same(weights(model), weights(prepared))


# torchtitan ---------------------------------------------------------------------------------------


def torchtitan_by_names(folder):
    """torchtitan since 2026 flattens by itself: `param_names` and the keys of the live state."""
    dist.init_process_group("gloo")
    trained = module("train_torchtitan")
    model, container = trained.make()
    (optimizer,) = container.optimizers
    trained.train(model, container, 0, 20)
    saved, values = optimizer.state_dict(), weights(model)
    (group,) = saved["param_groups"]
    flat = {
        f"{name}.{key}": value
        for name, number in zip(group["param_names"], group["params"], strict=True)
        for key, value in saved["state"][number].items()
    }
    expected = trained.train(model, container, 20, 40)

    model, container = trained.make()
    (optimizer,) = container.optimizers
    for name, p in model.named_parameters():
        p.data.copy_(dist.tensor.distribute_tensor(values[name], p.device_mesh, p.placements))
    state = {
        number: {key: flat[f"{name}.{key}"] for key in optimizer.state[p]}
        for number, (name, p) in enumerate(model.named_parameters())
    }
    optimizer.load_state_dict({"state": state, "param_groups": [group]})
    assert trained.train(model, container, 20, 40) == expected


def titan_container(folder):
    """torchtitan's own container, and a checkpoint of its own flat state, resume bit for bit."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    from eshampoo import EShampoo

    class Ours(OptimizersContainer):
        @staticmethod
        def _resolve_optimizer_factory(name):
            return {"EShampoo": EShampoo}[name]

    def make():
        model, _ = trained.make()
        everything = ParamGroupConfig(
            pattern=".*", optimizer_name="EShampoo", optimizer_kwargs={"lr": 1e-2}
        )
        config = Ours.Config(param_groups=[everything], implementation="for-loop")
        return model, Ours(config, model_parts=[model])

    dist.init_process_group("gloo")
    trained, place = module("train_torchtitan"), [str(folder)]
    dist.broadcast_object_list(place)
    model, container = make()
    first = trained.train(model, container, 0, 20)
    whole = {"model": model.state_dict(), "optimizer": container.state_dict()}
    trained.save(whole, checkpoint_id=place[0])
    expected = trained.train(model, container, 20, 40)
    assert expected[-1] < first[0]

    model, container = make()
    whole = {"model": model.state_dict(), "optimizer": container.state_dict()}
    trained.load(whole, checkpoint_id=place[0])
    model.load_state_dict(whole["model"])
    container.load_state_dict(whole["optimizer"])
    assert trained.train(model, container, 20, 40) == expected


# Averages of the weights --------------------------------------------------------------------------


def averaging_resumes(folder):
    """An average of the weights is better than the last weights, and resumes bit for bit."""
    trained = module("train_averaging")
    through, stopped, resumed = trained.Run(), trained.Run(), trained.Run()
    through.train(0, 200)
    stopped.train(0, 100)
    torch.save(stopped.state_dict(), folder / "checkpoint.pt")
    resumed.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True))
    resumed.train(100, 200)
    same(weights(through.model), weights(resumed.model))
    same(weights(through.averaged), weights(resumed.averaged))
    assert trained.evaluate(through.averaged) < trained.evaluate(through.model)


def schedulefree_resumes(folder):
    trained = module("train_schedulefree")
    model, optimizer = trained.make()
    trained.train(model, optimizer, 0, 20)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, folder / "checkpoint.pt")
    expected = trained.train(model, optimizer, 20, 40)
    model, optimizer = trained.make()
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert trained.train(model, optimizer, 20, 40) == expected


# torchao ------------------------------------------------------------------------------------------


def torchao_refuses_a_cpu(folder):
    from torchao.optim import CPUOffloadOptimizer

    from eshampoo import EShampoo

    try:
        CPUOffloadOptimizer(torch.nn.Linear(64, 64).parameters(), EShampoo, lr=1e-3)
    except AssertionError as error:
        return str(error)
    raise AssertionError("torchao offloads from a CPU now: widen the recipe")


# All of them --------------------------------------------------------------------------------------

ALONE = {
    "train_plain": example("train_plain"),
    "train_accumulation": example("train_accumulation"),
    "train_amp": example("train_amp"),
    "train_switch": example("train_switch"),
    "train_groups": example("train_groups"),
    "train_tnt": example("train_tnt"),
    "train_trainer": example("train_trainer"),
    "trainer_resumes": trainer_resumes,
    "trainer_names": trainer_names,
    "trainer_logs": trainer_logs,
    "train_peft": example("train_peft"),
    "train_accelerate": example("train_accelerate"),
    "accelerate_resumes": accelerate_resumes(shard=False),
    "train_torchao": example("train_torchao"),
    "torchao_refuses_a_cpu": torchao_refuses_a_cpu,
    "train_lightning": example("train_lightning"),
    "lightning_resumes": lightning_resumes,
    "lightning_logs": lightning_logs,
    "lightning_logs_steps": lightning_logs_steps,
    "train_timm": example("train_timm"),
    "train_nanogpt": example("train_nanogpt", "--backend", "aot_eager"),
    "train_averaging": example("train_averaging"),
    "averaging_resumes": averaging_resumes,
    "train_schedulefree": example("train_schedulefree"),
    "schedulefree_resumes": schedulefree_resumes,
    "train_pinn": example("train_pinn"),
    "train_convnet": example("train_convnet"),
    "train_trl": example("train_trl"),
}
ON_TWO_RANKS = {
    "ddp_resumes": stops_and_resumes("train_ddp"),
    "fsdp2_resumes": stops_and_resumes("train_fsdp2"),
    "train_tp": example("train_tp"),
    "train_torchtitan": example("train_torchtitan"),
    "torchtitan_by_names": torchtitan_by_names,
    "titan_container": titan_container,
    "train_accelerate": example("train_accelerate"),
    "train_accelerate --shard": example("train_accelerate", "--shard"),
    "accelerate_resumes": accelerate_resumes(shard=False),
    "accelerate_resumes --shard": accelerate_resumes(shard=True),
    "accelerate_follows_fsdp2": accelerate_follows_fsdp2,
    "train_lightning": example("train_lightning"),
    "lightning_resumes": lightning_resumes,
}


def clean_up():
    """What frameworks leave behind in a process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "accelerate.state" in sys.modules:
        forget_accelerate()


def main():
    path, *jobs = sys.argv[1:]
    known = ON_TWO_RANKS if os.environ.get("WORLD_SIZE") == "2" else ALONE
    torch.set_num_threads(1)
    answers = {}
    for job in jobs:
        name, _, port = job.rpartition(":")
        os.environ["MASTER_PORT"] = port
        folder = Path(path).parent / f"{name} on {os.environ.get('WORLD_SIZE', '1')}"
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            answers[name] = {"found": known[name](folder), "trouble": None}
            clean_up()
        except BaseException:
            answers[name] = {"found": None, "trouble": traceback.format_exc()}
        faulthandler.cancel_dump_traceback_later()
        Path(path).write_text(json.dumps(answers))
        if answers[name]["trouble"] is not None:
            os._exit(1)  # without waiting for the other ranks


if __name__ == "__main__":
    main()
