"""Checkpoints move between worlds, kinds of parallelism, plain files and AdamW."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from one_process import EXACT, kind_for, require, sharded, split_inside
from problems import STEPS, Parallel, feed, make, optimizer, placed, reference, tensors, train
from saves import (
    HALF,
    SAVED,
    first_third,
    fresh,
    load_,
    loaded,
    save_halfway,
    second_third,
    state_of,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def halfway(worlds, tmp_path_factory):
    """A folder with runs that four ranks have saved at half."""
    folder = tmp_path_factory.mktemp("halfway")
    worlds[4].run(save_halfway, folder=folder)
    return folder


@pytest.fixture(scope="session")
def two_thirds(worlds, tmp_path_factory):
    """A checkpoint of a run on four ranks that was continued on two."""
    folder = tmp_path_factory.mktemp("thirds")
    worlds[4].run(first_third, folder=folder)
    worlds[2].run(second_third, folder=folder)
    return folder / "two-thirds"


@pytest.mark.parametrize("method", SAVED)
def test_all_ranks_save_the_same_entries_with_the_same_global_shapes_and_dtypes(method, halfway):
    saved = [
        json.loads((halfway / f"entries-{method}-{rank}.json").read_text()) for rank in range(4)
    ]
    assert len(saved[0]) > (20 if method == "Muon" else 50)  # Muon keeps a momentum and no factors
    for entries in saved:
        assert entries == saved[0]


@pytest.mark.ranks(4)
def test_training_goes_on_undisturbed_while_it_is_saved(world, halfway):
    values = torch.load(halfway / "end.pt", weights_only=True)
    return require(values.items(), reference("EShampoo"), EXACT)


@pytest.mark.ranks(4)
def test_ranks_without_a_part_of_a_parameter_have_its_entries(world):
    """A vector shorter than the world leaves some ranks without a part of it."""
    values, grads = tensors([(3,), (7, 5)], 3)
    params = placed(values, [(Shard(0),)] * 2, world.mesh())
    ours = optimizer("EShampoo", params)
    for step in grads:
        feed(params, step)
        ours.step()
    keys = {i: sorted(s) for i, s in ours.state_dict()["state"].items()}
    everyone = [None] * world.size
    dist.all_gather_object(everyone, keys)
    assert all(theirs == keys for theirs in everyone)
    assert set(keys) == {0, 1}


@pytest.mark.ranks(1, 2, 3)
def test_a_run_saved_on_four_ranks_continues_on_fewer(world, halfway):
    """Every checkpoint in some world, EShampoo's in all."""
    rows = {
        1: ("rows", "Muon"),
        2: ("Shampoo", "CASPR", "observed"),
        3: ("SOAP", "KLShampoo", "one side"),
    }[world.size]
    files = {f"half-{method}": method for method in ("EShampoo", *rows)}
    files |= {"async": "EShampoo"} if world.size == 1 else {}
    worst = 0.0
    for name, method in files.items():
        model, ours = loaded(world, halfway / name, method)
        train(model, ours, range(HALF, STEPS), world.rank, world.size)
        expected = reference(method, kind_for(method))
        worst = max(worst, require(model.named_parameters(), expected, EXACT, name))
    return worst


@pytest.mark.ranks(2)
def test_a_gathered_state_continues_sharded_and_in_one_process(world, halfway):
    """A gathered state into one process without any sharding, and into a sharded run."""
    worst = 0.0
    for rank0 in (False, True):
        saved = torch.load(halfway / "half.pt", weights_only=True)  # loading changes it
        model, ours = fresh(world)
        mine = saved if not rank0 or world.rank == 0 else {"model": {}, "optimizer": {}}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=rank0)
        set_model_state_dict(model, mine["model"], options=options)
        set_optimizer_state_dict(model, ours, mine["optimizer"], options=options)
        train(model, ours, range(HALF, STEPS), world.rank, world.size)
        worst = max(worst, require(model.named_parameters(), reference("EShampoo"), EXACT, "full"))
    saved = torch.load(halfway / "half.pt", weights_only=True)
    one = make(seed=6)
    single = optimizer("EShampoo", one.named_parameters())
    set_state_dict(
        one, single, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    train(one, single, range(HALF, STEPS))
    return max(worst, require(one.named_parameters(), reference("EShampoo"), EXACT, "single"))


@pytest.mark.ranks(2)
def test_a_state_of_one_process_continues_in_every_kind_of_run_and_back(world, tmp_path):
    """`torch.save` of a single process into an FSDP2 run and a DDP run with a group, and back."""
    one = make()
    single = optimizer("EShampoo", one.named_parameters())
    train(one, single, range(HALF))
    path = tmp_path / f"single-{world.rank}.pt"
    torch.save({"model": one.state_dict(), "optimizer": single.state_dict()}, path)
    saved = torch.load(path, weights_only=True)
    # Into FSDP2, by name …
    model, ours = fresh(world)
    by_name = get_optimizer_state_dict(one, single)
    set_state_dict(
        model,
        ours,
        model_state_dict=dict(saved["model"]),  # it is changed
        optim_state_dict=by_name,
        options=StateDictOptions(full_state_dict=True),
    )
    train(model, ours, range(HALF, STEPS), world.rank, world.size)
    worst = require(model.named_parameters(), reference("EShampoo"), EXACT, "by name")
    # … and directly, with full tensors for the sharded ones.
    direct = sharded(make(seed=5), world.mesh())
    ours = optimizer("EShampoo", direct.named_parameters())
    ours.load_state_dict(saved["optimizer"])
    for p, value in zip(direct.parameters(), saved["model"].values(), strict=True):
        feed([p], [value])
        p.data.copy_(p.grad)
    train(direct, ours, range(HALF, STEPS), world.rank, world.size)
    worst = max(worst, require(direct.named_parameters(), reference("EShampoo"), EXACT, "direct"))
    # Into DDP with a group, whose state_dict is then again one for a single process.
    inner = make(seed=0)
    inner.load_state_dict(saved["model"])
    model = nn.parallel.DistributedDataParallel(inner)
    ours = optimizer("EShampoo", model.named_parameters(), process_group=dist.group.WORLD)
    ours.load_state_dict(saved["optimizer"])
    train(model, ours, range(HALF, HALF + 5), world.rank, world.size, inner)
    back = make(seed=7)
    back.load_state_dict(inner.state_dict())
    last = optimizer("EShampoo", back.named_parameters())
    last.load_state_dict(ours.state_dict())
    train(back, last, range(HALF + 5, STEPS))
    return max(worst, require(back.named_parameters(), reference("EShampoo"), EXACT, "back"))


@pytest.mark.ranks(2)
def test_a_state_of_adamw_on_shards_is_a_start_for_eshampoo(world, tmp_path):
    """The state of AdamW on sharded parameters is a start for EShampoo, as in one process."""
    runs = []
    for shard in (False, True):
        model = sharded(make(), world.mesh()) if shard else make()
        part = (world.rank, world.size) if shard else (0, 1)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(model, adam, range(6), *part)  # factors have full rank at the next check
        if shard:
            saved = {"optimizer": get_optimizer_state_dict(model, adam)}
            dcp.save(saved, checkpoint_id=tmp_path)
            model.zero_grad()  # with gradients, torch would not make up a state to be filled
            empty = torch.optim.AdamW(model.parameters(), lr=1e-3)
            loaded = {"optimizer": get_optimizer_state_dict(model, empty)}
            dcp.load(loaded, checkpoint_id=tmp_path)
            ours = optimizer("EShampoo", model.named_parameters())
            set_optimizer_state_dict(model, ours, loaded["optimizer"])
        else:
            ours = optimizer("EShampoo", model.named_parameters())
            ours.load_state_dict(adam.state_dict())
        train(model, ours, range(6, STEPS), *part)
        runs.append(model)
    expected = {n: p.detach() for n, p in runs[0].named_parameters()}
    return require(runs[1].named_parameters(), expected, EXACT)


@pytest.mark.ranks(4)
def test_what_hsdp_saves_fsdp_loads(world, tmp_path):
    """Placements on two mesh dimensions load on another mesh: what is stored does not know them."""
    mesh = world.mesh(2, 2)
    model = sharded(make(), mesh)
    ours = optimizer("EShampoo", model.named_parameters())
    train(model, ours, range(HALF), world.rank, world.size)
    dcp.save(state_of(model, ours), checkpoint_id=tmp_path)
    model, ours = loaded(world, tmp_path)
    train(model, ours, range(HALF, STEPS), world.rank, world.size)
    return require(model.named_parameters(), reference("EShampoo"), EXACT)


@pytest.mark.ranks(4)
def test_a_tensor_parallel_run_is_saved_and_continued(world, tmp_path):
    mesh = world.mesh(2, 2, names=("dp", "tp"))

    def build(seed):
        model = split_inside(make(Parallel, seed=seed), mesh["tp"])
        for layer in (model.up, model.down, model):
            fully_shard(layer, mesh=mesh["dp"])
        return model, optimizer("EShampoo", model.named_parameters())

    model, ours = build(0)
    train(model, ours, range(HALF), world.rank // 2, 2)
    dcp.save(state_of(model, ours), checkpoint_id=tmp_path)
    model, ours = build(4)
    load_(model, ours, tmp_path)
    train(model, ours, range(HALF, STEPS), world.rank // 2, 2)
    return require(model.named_parameters(), reference("EShampoo", Parallel), EXACT)


@pytest.mark.ranks(3)
def test_a_run_that_changes_its_world_twice_follows_one_process(world, two_thirds):
    model, ours = loaded(world, two_thirds)
    train(model, ours, range(20, STEPS), world.rank, world.size)
    return require(model.named_parameters(), reference("EShampoo"), EXACT)
