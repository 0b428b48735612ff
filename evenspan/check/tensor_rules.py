"""Rules about the tensor axis: what its ranks share must divide."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from evenspan.check.registry import Broken, Run, one_of, rule
from evenspan.check.shape_rules import around
from evenspan.config.text_schema import TextRunConfig
from evenspan.topology.degrees import divisors

AT = "parallel.mesh.tensor"
SWITCH = "parallel.backend_kwargs.sequence_parallel"
MODEL = ("model_kwargs", AT)


@rule(
    "T106",
    "tensor-sequence-parallel-needs-tensor",
    reads=(AT, "parallel.mesh.shard", "sequence_parallel_size", SWITCH),
)
def sequence_parallel_needs_both(run: Run) -> Iterator[Broken]:
    """Tensor-mesh sequence parallelism splits what tensor parallelism leaves whole, on an FSDP2 model."""
    mesh = run.config.parallel.mesh
    if not run.config.parallel.backend_kwargs.sequence_parallel:
        return
    # Parameters are sharded over shard x context: with a context axis FSDP2 is there.
    if run.tensor == 1 or (mesh.shard == 1 and run.context == 1):
        yield Broken(
            at=SWITCH,
            fact=f"true needs parallel.mesh.tensor and parallel.mesh.shard above 1, "
            f"but tensor is {mesh.tensor} and shard is {mesh.shard}",
            hint="write for example parallel.mesh.tensor: 2 and parallel.mesh.shard: 2, or false here; a "
            "sequence split over ranks outside attention is sequence_parallel_size",
        )


@rule("M303", "tensor-divides-heads", reads=(*MODEL, "sequence_parallel_size"))
def tensor_divides_heads(run: Run) -> Iterator[Broken]:
    """Each tensor rank holds heads / tensor heads, and the context ranks share those again."""
    if run.tensor in (None, 1) or run.sizes is None or run.sizes.heads % run.context:
        return  # M301 is about context ranks alone
    assert run.tensor is not None
    heads, ranks = run.sizes.heads, run.tensor * run.context
    if heads % ranks:
        share = f"tensor {run.tensor}" + (f" x context {run.context}" if run.context > 1 else "")
        legal = divisors(heads // run.context)
        yield Broken(
            at=AT,
            fact=f"{share} does not divide the {heads} attention heads",
            hint=f"with {heads} heads{_beside(run)} {AT} is {one_of(legal)}",
        )


@rule("M304", "tensor-divides-kv-heads", reads=(*MODEL, "sequence_parallel_size"))
def tensor_divides_kv_heads(run: Run) -> Iterator[Broken]:
    """A tensor rank's query heads need their key/value heads; context ranks share or copy what is left."""
    if run.tensor is None or run.sizes is None:
        return
    kv_heads = run.sizes.kv_heads
    if kv_heads == run.sizes.heads:
        return  # M301 and M303 have said so
    if kv_heads % run.tensor:
        fact = f"tensor {run.tensor} does not divide the {kv_heads} key/value heads"
        yield Broken(at=AT, fact=fact, hint=f"{AT} is {one_of(divisors(kv_heads))}")
        return
    local = kv_heads // run.tensor
    if local % run.context and run.context % local:
        legal = [
            size for size in divisors(run.sizes.heads // run.tensor) if not local % size or not size % local
        ]
        yield Broken(
            at="sequence_parallel_size",
            fact=f"{run.context} context ranks and {local} key/value heads a tensor rank: neither "
            "divides the other",
            hint=f"sequence_parallel_size is {one_of(legal)}",
        )


@rule("M305", "tensor-divides-ffn", reads=MODEL)
def tensor_divides_ffn(run: Run) -> Iterator[Broken]:
    """The feed-forward width is split over the tensor ranks in equal parts."""
    if run.tensor is not None and run.sizes is not None and run.sizes.ffn % run.tensor:
        legal = divisors(gcd(run.sizes.ffn, run.sizes.heads))
        yield Broken(
            at=AT,
            fact=f"tensor {run.tensor} does not divide the feed-forward width {run.sizes.ffn}",
            hint=f"with {run.sizes.heads} heads too, {AT} is {one_of(legal)}",
        )


@rule("M306", "tensor-divides-vocabulary", reads=MODEL)
def tensor_divides_vocabulary(run: Run) -> Iterator[Broken]:
    """Embedding and head are split over the vocabulary in equal parts."""
    if run.tensor is None or run.sizes is None or run.sizes.vocabulary is None:
        return
    if run.sizes.vocabulary % run.tensor:
        sizes = around(run.sizes.vocabulary, run.tensor)
        yield Broken(
            at=AT,
            fact=f"tensor {run.tensor} does not divide the vocabulary of {run.sizes.vocabulary}",
            hint=f"use a vocabulary of {sizes[-1]} (model_kwargs.overrides.vocab_size), or another degree",
        )


@rule(
    "S206",
    "tensor-divides-tokens",
    reads=(
        "image_or_video_shape",
        "num_frame_per_block",
        "algorithm.teacher_forcing",
        "data.sequence_length",
        "sequence_parallel_size",
        "parallel.padding",
        AT,
        SWITCH,
    ),
)
def tensor_divides_tokens(run: Run) -> Iterator[Broken]:
    """Sequence parallelism cuts each rank's tokens again, into equal shards; video in whole frames."""
    parallel = run.config.parallel
    if not parallel.backend_kwargs.sequence_parallel or parallel.padding == "auto" or run.tensor is None:
        return
    if isinstance(run.config, TextRunConfig):
        what, length, unit = "tokens", run.config.data.sequence_length, 1
        at, cut = "data.sequence_length", run.tensor
    else:
        what, length, unit = "latent frames", run.config.frames, run.config.num_frame_per_block
        at = "image_or_video_shape"
        cut = run.tensor // gcd(run.tensor, 2 if run.config.algorithm.teacher_forcing else 1)
    multiple = run.context * lcm(unit, cut)
    if length % (run.context * unit) == 0 and length % multiple:
        yield Broken(
            at=at,
            fact=f"{length} {what} over {run.context} context ranks are cut again for {run.tensor} tensor "
            f"ranks: not a multiple of {multiple}",
            hint=f"use {one_of(around(length, multiple))} {what}, or parallel.padding=auto, which pads",
        )


def _beside(run: Run) -> str:
    return f" and sequence_parallel_size {run.context}" if run.context > 1 else ""
