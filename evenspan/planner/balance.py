"""Who does how much work in one micro-batch, forward and backward: counted, not run. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from evenspan.attention.clip_pattern import clip_pattern
from evenspan.comm.heads import check_heads, exchanged_heads
from evenspan.config.schema import RunConfig
from evenspan.model.presets import model_preset
from evenspan.topology.degrees import Degrees
from evenspan.topology.from_config import frame_layout, solve_degrees
from evenspan.topology.layout import FrameLayout

BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """One global rank's part of one micro-batch."""

    frames: int
    """Latent frames it owns, padding excluded, over the samples of the micro-batch."""
    tokens: int
    """Tokens it holds between attention layers: clean and noisy copies, padding included."""
    loss_tokens: int
    """Noisy tokens that carry loss."""
    attention_pairs: int
    """Query-key pairs that it computes, per layer: pairs of the whole sequence x the heads it has inside."""
    exchanged_bytes: int
    """Bytes it sends to other ranks in the exchanges of all layers, forward and backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceInputs:
    """What the work depends on."""

    degrees: Degrees
    layout: FrameLayout
    batch: int
    """Samples per data-parallel rank."""
    tokens_per_frame: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes_per_element: int
    """Of q, k, v and the attention output, as they travel."""
    teacher_forcing: bool = True
    causal: bool = True
    window: int | None = None
    """Attention window in latent frames; None sees the whole past."""
    sink: int = 0
    """First latent frames that stay visible."""
    first_frame_given: bool = False
    """Whether latent frame 0 carries no loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceReport:
    """The work of every rank, in global rank order."""

    ranks: tuple[RankWork, ...]

    @property
    def max_over_mean(self) -> dict[str, float]:
        """For each quantity the largest rank over the mean: 1.0 is even, and what nobody does is even too."""
        return {name: _max_over_mean([row[name] for row in self._rows()]) for name in _NAMES}

    def as_json(self) -> dict[str, object]:
        """{"ranks": [one object a rank], "max_over_mean": {...}} with equal keys."""
        return {"ranks": self._rows(), "max_over_mean": self.max_over_mean}

    def as_text(self) -> str:
        """A table of one line a rank and a last line of max/mean."""
        table = [["rank", *(name.replace("_", " ") for name in _NAMES)]]
        table += [
            [str(rank), *(f"{row[name]:,}" for name in _NAMES)] for rank, row in enumerate(self._rows())
        ]
        table.append(["max/mean", *(f"{value:.3f}" for value in self.max_over_mean.values())])
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table
        )

    def _rows(self) -> list[dict[str, int]]:
        return [asdict(work) for work in self.ranks]


_NAMES = tuple(field.name for field in fields(RankWork))


def balance_report(config: RunConfig, world_size: int) -> BalanceReport:
    """The work of each of `world_size` ranks under `config`. Raises T102, T103, S201, M101, M103, X101."""
    return count_work(balance_inputs(config, world_size))


def balance_inputs(config: RunConfig, world_size: int) -> BalanceInputs:
    """What `config` says about the work."""
    kwargs = config.model_kwargs
    model = model_preset(kwargs.model_name).with_overrides(kwargs.overrides)
    degrees = solve_degrees(config, world_size=world_size)
    return BalanceInputs(
        degrees=degrees,
        layout=frame_layout(config, tensor=degrees.tensor),
        batch=config.training.batch_size,
        tokens_per_frame=model.tokens_per_frame(config.latent_height, config.latent_width),
        layers=model.num_layers,
        heads=model.num_attention_heads,
        kv_heads=model.num_attention_heads,
        head_dim=model.attention_head_dim,
        bytes_per_element=BYTES_PER_ELEMENT[config.parallel.mixed_precision],
        teacher_forcing=config.algorithm.teacher_forcing,
        causal=config.algorithm.causal,
        window=None if kwargs.local_attn_size < 0 else kwargs.local_attn_size,
        sink=kwargs.sink_size,
        first_frame_given=config.algorithm.i2v,
    )


def count_work(inputs: BalanceInputs) -> BalanceReport:
    """The work of every global rank. Raises X101 when the context ranks do not divide the heads."""
    degrees, layout = inputs.degrees, inputs.layout
    check_heads(inputs.heads, kv_heads=inputs.kv_heads, ranks=degrees.context)
    pattern = clip_pattern(
        layout,
        teacher_forced=inputs.teacher_forcing,
        causal=inputs.causal,
        window=inputs.window,
        sink=inputs.sink,
    )
    pairs = pattern.pairs * inputs.tokens_per_frame**2
    copies = 2 if inputs.teacher_forcing else 1
    by_context = []
    for context_rank in range(degrees.context):
        valid = layout.valid(context_rank)
        frames_with_loss = valid.count - (inputs.first_frame_given and valid.start == 0)
        work = RankWork(
            frames=inputs.batch * valid.count,
            tokens=inputs.batch * copies * layout.frames_local * inputs.tokens_per_frame,
            loss_tokens=inputs.batch * max(0, frames_with_loss) * inputs.tokens_per_frame,
            attention_pairs=inputs.batch * pairs * (inputs.heads // degrees.context),
            exchanged_bytes=_exchanged_bytes(inputs),
        )
        by_context.append(work)
    contexts = (degrees.coordinates(rank).context for rank in range(degrees.world_size))
    return BalanceReport(ranks=tuple(by_context[context] for context in contexts))


def _exchanged_bytes(inputs: BalanceInputs) -> int:
    """q, k, v in and the output back, forward and backward: 4 (h + k) B S e (P-1) / P^2 per layer."""
    ranks = inputs.degrees.context
    copies = 2 if inputs.teacher_forcing else 1
    tokens_local = inputs.batch * copies * inputs.layout.frames_local * inputs.tokens_per_frame
    heads_there_and_back = exchanged_heads(inputs.heads, kv_heads=inputs.kv_heads, ranks=ranks) + inputs.heads
    held = tokens_local * heads_there_and_back * inputs.head_dim * inputs.bytes_per_element
    return 2 * inputs.layers * held * (ranks - 1) // ranks


def _max_over_mean(values: Sequence[int]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else 1.0
