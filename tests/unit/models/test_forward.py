"""Forwards that no backward follows leave nothing behind."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from grpo.models.build import forget_forwards

pytestmark = pytest.mark.usefixtures("one_rank")


def test_what_fsdp_notes_of_forwards_alone_is_dropped():
    """Two layers and the whole are three groups, of which those with parameters of their own note each forward."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    sharded = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    sharded.load_state_dict(plain.state_dict())
    mesh = init_device_mesh("cpu", (1,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    inputs = torch.ones(4, 2)
    with torch.no_grad():
        for _ in range(5):
            sharded(inputs)
    noted = sharded._get_fsdp_state()._comm_ctx.post_forward_order
    assert len(noted) == 2 * 5
    forget_forwards(sharded)
    assert len(noted) == 0
    for module in (sharded, plain):  # a step after it is the same
        module(inputs).sum().backward()
    for parameter, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad.full_tensor(), expected.grad)
    assert len(noted) == 0
