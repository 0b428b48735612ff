"""Mistakes of the parallel layers are named before anything is sent; torch's fake backend sends nothing."""

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from evenspan.attention.core import attention_core
from evenspan.comm import groups
from evenspan.comm.collectives import split_tokens
from evenspan.comm.exchange import scatter_heads_gather_tokens, scatter_tokens_gather_heads
from evenspan.config.environment import LaunchEnv, Launcher
from evenspan.errors import CommError, ModelError, TopologyError
from evenspan.parallel.apply import parallelize
from evenspan.parallel.clip import clip_grad_norm
from evenspan.parallel.context import UlyssesCore, apply_context
from evenspan.parallel.fsdp import set_requires_gradient_sync
from evenspan.topology.degrees import Degrees
from evenspan.topology.mesh import MEETING_TIMEOUT, build_topology, init_distributed
from tests.distributed import toy


@pytest.fixture
def four_ranks():
    """A group of four of which this process is rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield dist.group.WORLD
    dist.destroy_process_group()


def _attention(core):
    module = nn.Module()
    if core is not None:
        module.core = core
    return module


def test_one_exchange_needs_one_shape(four_ranks):
    q = torch.zeros(1, 2, 4, 3)
    with pytest.raises(
        CommError, match=r"q \(1, 2, 4, 3\) torch.float32, k \(1, 2, 4, 3\) torch.bfloat16"
    ) as e:
        scatter_heads_gather_tokens(q, q.bfloat16(), q.bfloat16(), group=four_ranks)
    assert e.value.code == "X103"
    with pytest.raises(CommError) as e:
        scatter_heads_gather_tokens(q, q, q[:, :1], group=four_ranks)
    assert e.value.code == "X103"


def test_tokens_must_split(four_ranks):
    with pytest.raises(CommError, match="10 tokens cannot be shared by the 4 ranks") as e:
        split_tokens(torch.zeros(1, 10, 2), group=four_ranks)
    assert e.value.code == "X104"
    assert "pad to 12 tokens" in e.value.hint
    with pytest.raises(CommError) as e:
        scatter_tokens_gather_heads(torch.zeros(1, 10, 1, 2), group=four_ranks)
    assert e.value.code == "X104"


@pytest.mark.parametrize("core", [None, nn.Identity(), "already exchanged"])
def test_context_needs_a_local_core(four_ranks, core):
    if core == "already exchanged":
        core = UlyssesCore(attention_core("segments"), group=four_ranks)
    with pytest.raises(ModelError) as e:
        apply_context([_attention(core)], group=four_ranks, heads=4)
    assert e.value.code == "M401"


def test_context_needs_an_attention_and_heads_that_split(four_ranks):
    with pytest.raises(ModelError, match="no self-attention to spread over 4 context ranks"):
        apply_context([], group=four_ranks, heads=4)
    with pytest.raises(CommError, match="6 query heads cannot be shared by 4 context ranks"):
        apply_context([_attention(attention_core("segments"))], group=four_ranks, heads=6)


def test_one_process_without_a_group_runs_the_plain_model():
    topology = build_topology(Degrees(), device=torch.device("cpu"))
    model = toy.toy(torch.float32)
    core = model.blocks[0].attn1.core
    parallelize(model, topology, blocks=model.blocks, heads=toy.HEADS, mixed_precision="fp64")
    assert model.blocks[0].attn1.core is core
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    set_requires_gradient_sync(model, False)
    loss, _, _ = toy.loss_sum(model, 0)
    loss.backward()
    copy = [parameter.grad.clone().requires_grad_() for parameter in model.parameters()]
    want = torch.nn.utils.get_total_norm(copy)
    assert float(clip_grad_norm(model.parameters(), max_norm=1.0)) == pytest.approx(float(want), rel=1e-14)
    assert float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) == pytest.approx(1.0)


def test_bf16_needs_a_process_group():
    topology = build_topology(Degrees(), device=torch.device("cpu"))
    model = toy.toy()
    with pytest.raises(TopologyError) as e:
        parallelize(model, topology, blocks=model.blocks, heads=toy.HEADS, mixed_precision="bf16")
    assert e.value.code == "T301"


def test_a_rank_needs_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(TopologyError, match="local rank 1 has no GPU: this machine shows 1") as e:
        init_distributed(LaunchEnv(rank=1, local_rank=1, world_size=2, local_world_size=2))
    assert e.value.code == "T114"


def test_published_groups(four_ranks):
    with pytest.raises(CommError) as e:
        groups.get_sequence_parallel_group()
    assert e.value.code == "X301"
    assert (groups.get_sequence_parallel_rank(), groups.get_sequence_parallel_world_size()) == (0, 1)
    groups.set_sequence_parallel_group(four_ranks)
    groups.set_data_parallel_group(four_ranks)
    assert groups.get_sequence_parallel_group() is groups.get_data_parallel_group() is four_ranks
    assert (groups.get_sequence_parallel_rank(), groups.get_sequence_parallel_world_size()) == (0, 4)
    assert (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()) == (0, 4)
    groups.set_sequence_parallel_group(None)
    groups.set_data_parallel_group(None)
    assert (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()) == (0, 1)
    with pytest.raises(CommError, match="no data-parallel group"):
        groups.get_data_parallel_group()


@pytest.fixture
def _own_variables(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "unset")  # what init_distributed exports is gone afterwards


@pytest.mark.usefixtures("_own_variables")
def test_ranks_that_do_not_meet_are_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        env = LaunchEnv(world_size=2, local_world_size=2, master_port=port, launcher=Launcher.TORCHRUN)
        with pytest.raises(TopologyError, match=rf"T115 rank 0 of 2 .* at 127\.0\.0\.1:{port}"):
            init_distributed(env, backend="gloo", meeting=timedelta(seconds=5))
    assert not dist.is_initialized()


@pytest.mark.usefixtures("_own_variables")
def test_ranks_that_wait_for_one_that_never_comes_are_named(monkeypatch):
    """Under torchrun the agent keeps the store, so the ranks that are there reach it."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = LaunchEnv(
        rank=1,
        local_rank=1,
        world_size=2,
        local_world_size=2,
        master_port=store.port,
        launcher=Launcher.TORCHRUN,
    )
    with pytest.raises(TopologyError, match=r"T115 rank 1 of 2 .*: 1 of 2 ranks arrived in 1 s"):
        init_distributed(env, backend="gloo", meeting=timedelta(seconds=1))
    assert not dist.is_initialized()
    assert timedelta(minutes=1) <= MEETING_TIMEOUT <= timedelta(minutes=2)
