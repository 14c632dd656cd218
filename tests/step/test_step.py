"""What a step costs: for a GPU, proved on a CPU, no host reads, few launches, no float64."""

import pytest
import torch
from counting import count, flops, of_a_step
from keyword_table import METHODS
from training import feed, parameters, problem, run

from eshampoo import SOAP, EShampoo, KLShampoo, Shampoo

NEVER = 10**9


def with_gradients(layers):
    generator = torch.Generator().manual_seed(0)
    params = []
    for _ in range(layers):
        for shape in ((48, 40), (48,)):
            p = torch.randn(shape, generator=generator).requires_grad_()
            p.grad = torch.randn(shape, generator=generator)
            params.append(p)
    return params


def build(method, layers, **keywords):
    optimizer = method(with_gradients(layers), max_dim=64, **keywords)
    for _ in range(2):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("method", [EShampoo, Shampoo, SOAP, KLShampoo])
def test_a_plain_step_reads_nothing(method):
    optimizer = build(method, 3, frequency=NEVER)
    assert count(optimizer.step).reads == []


@pytest.mark.parametrize("method", [EShampoo, Shampoo, SOAP, KLShampoo])
def test_a_plain_step_uploads_nothing(method):
    optimizer = build(method, 3, frequency=NEVER)
    assert count(optimizer.step).uploads == []


@pytest.mark.parametrize("method", [EShampoo, Shampoo, KLShampoo])
def test_a_check_with_nothing_due_reads_once(method):
    optimizer = build(method, 3, frequency=NEVER)
    for group in optimizer.param_groups:
        group.update(frequency=1, tau=0.999)
    assert count(optimizer.step).reads == ["tolist"]


@pytest.mark.parametrize("method", [EShampoo, Shampoo, SOAP, KLShampoo])
def test_the_number_of_launches_does_not_grow_with_the_layers(method):
    few, many = (
        # foreach is one dispatched operation for a list of any length
        count(build(method, layers, frequency=NEVER).step).operations
        for layers in (2, 12)
    )
    assert few == many


@pytest.mark.parametrize("method", [EShampoo, Shampoo, SOAP, KLShampoo])
def test_no_float64_is_made_for_float32_parameters(method):
    optimizer = build(method, 2, frequency=1)
    assert count(optimizer.step).doubles == []


def test_the_counter_sees_every_kind_of_read():
    x = torch.ones(3)
    assert count(lambda: x.tolist()).reads == ["tolist"]
    assert count(lambda: x[0].item()).reads == ["item"]
    assert count(lambda: bool(x[0] > 0)).reads == ["__bool__"]
    assert count(lambda: float(x[0])).reads == ["__float__"]
    assert len(count(lambda: torch.tensor([1.0, 2.0])).uploads) == 1
    assert "aten.add.Tensor" in count(lambda: x + x.double()).doubles


@pytest.mark.parametrize("graft", [None, "adam"])
def test_a_plain_step_of_stale_shampoo_costs_two_units_of_products_and_the_others_three(graft):
    m, n = 12, 20
    unit = 2 * m * n * (m + n)

    def units(method, **options):
        return of_a_step(flops, method, check=False, shape=(m, n), **options) / unit

    assert 1 < units("Shampoo", graft=graft) <= 2
    for method in ("EShampoo", "KLShampoo", "SOAP"):
        assert 2 < units(method) <= 3


def ops_of_steps(layers, method, checks):
    """Operations of a plain step and of a step with a check, for this many equal layers."""
    tensors, grads = problem([(4, 4), (4,)] * layers, 8)
    params = parameters(tensors)
    options = {"frequency": 4, "tau": 0.0}
    optimizer = METHODS[method](params, **options)
    run(optimizer, params, grads[:7] if checks else grads[:5])
    feed(params, grads[7])
    return count(optimizer.step)


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_operations_does_not_grow_with_the_number_of_equal_layers(method, checks):
    few, many = (ops_of_steps(layers, method, checks) for layers in (2, 12))
    assert few.operations == many.operations
    assert few.times("bmm") > 0


def test_a_bucket_without_gradients_keeps_its_neighbours_apart():
    """Parts of different dtypes are never in one batch, whatever lies between them."""
    dtypes = {(2, 3): torch.float64, (4,): torch.float32, (3, 2): torch.float32}
    params = [torch.ones(shape, dtype=dtype).requires_grad_() for shape, dtype in dtypes.items()]
    optimizer = EShampoo(params)
    for p in (params[0], params[2]):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all((p < 1).all() for p in (params[0], params[2]))
    assert (params[1] == 1).all()
