"""64 ranks in one process on torch's fake backend: groups are checked, nothing travels."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from evenspan.config.environment import LaunchEnv
from evenspan.errors import TopologyError
from evenspan.topology.degrees import Axis, Degrees
from evenspan.topology.mesh import build_topology, init_distributed

CPU = torch.device("cpu")


@pytest.fixture
def fake_world():
    """Makes this process rank `rank` of a fake world, and ends that world."""

    def start(*, rank, world_size=64):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return SimpleNamespace(rank=rank)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def _ranks(group):
    return dist.get_process_group_ranks(group)


@pytest.mark.parametrize("rank", [0, 5, 37, 63])
def test_groups_of_64_ranks_follow_the_arithmetic(fake_world, rank):
    fake_world(rank=rank)
    degrees = Degrees(replicate=2, shard=4, context=8)
    topology = build_topology(degrees, device=CPU)
    assert topology.rank == rank
    assert topology.coordinates == degrees.coordinates(rank)
    assert _ranks(topology.group(Axis.CONTEXT)) in degrees.context_groups()
    assert rank in _ranks(topology.group(Axis.CONTEXT))
    assert _ranks(topology.dp_group) in degrees.dp_groups()
    assert rank in _ranks(topology.dp_group)
    assert _ranks(topology.loss_group) == list(range(64))
    assert topology.group(Axis.TENSOR) is None
    assert topology.fsdp_mesh.mesh.shape == (2, 32)
    assert topology.fsdp_mesh.mesh_dim_names == ("replicate", "fsdp")
    assert topology.fsdp_mesh.mesh.flatten().tolist() == list(range(64))


def test_tensor_ranks_are_innermost_and_share_a_loss(fake_world):
    fake_world(rank=13)
    topology = build_topology(Degrees(shard=4, context=8, tensor=2), device=CPU)
    assert _ranks(topology.group(Axis.TENSOR)) == [12, 13]
    assert _ranks(topology.group(Axis.CONTEXT)) == list(range(1, 16, 2))
    assert _ranks(topology.loss_group) == list(range(1, 64, 2))
    assert topology.fsdp_mesh.mesh.tolist() == list(range(1, 64, 2))
    assert topology.group(Axis.REPLICATE) is None


def test_degrees_must_fill_the_world(fake_world):
    fake_world(rank=0)
    with pytest.raises(TopologyError, match="need 8 ranks, but the world has 64"):
        build_topology(Degrees(shard=8), device=CPU)


def test_equal_degrees_share_their_groups(fake_world):
    fake_world(rank=5)
    topology = build_topology(Degrees(shard=8, context=8), device=CPU)
    assert build_topology(Degrees(shard=8, context=8), device=CPU) is topology
    assert build_topology(Degrees(shard=4, context=16), device=CPU) is not topology
    dist.destroy_process_group()
    fake_world(rank=6)
    assert build_topology(Degrees(shard=8, context=8), device=CPU).rank == 6


def test_one_process_needs_no_group():
    topology = build_topology(Degrees(), device=CPU)
    assert topology.mesh is topology.fsdp_mesh is topology.loss_group is topology.dp_group is None
    assert all(topology.group(axis) is None for axis in Axis)
    assert (topology.rank, topology.coordinates.context) == (0, 0)
    with pytest.raises(TopologyError, match="need 2 ranks, but the world has 1"):
        build_topology(Degrees(context=2), device=CPU)


def test_one_process_may_have_a_group_without_a_port(fake_world):
    device = init_distributed(LaunchEnv(), backend="gloo")
    topology = build_topology(Degrees(), device=device)
    assert device == CPU
    assert topology.fsdp_mesh.size() == 1
    assert topology.loss_group is None
    assert topology.group(Axis.CONTEXT) is None
    dist.destroy_process_group()
