"""Rules about the network: its name, heads and channels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from evenspan.check.registry import Broken, Run, one_of, rule
from evenspan.config.text_schema import TextRunConfig
from evenspan.errors import ModelError, nearest
from evenspan.model.decoder_config import DECODER_PRESETS, DecoderConfig
from evenspan.topology.degrees import divisors

if TYPE_CHECKING:
    from evenspan.model.wan_config import WanConfig

NAME = "model_kwargs.model_name"
OVERRIDES = "model_kwargs.overrides"


@rule("M101", "unknown-model", reads=(NAME,))
def known_model(run: Run) -> Iterator[Broken]:
    """A preset fixes every size of the network, so its name must be one we know."""
    error = _name_error(run)
    if error is not None:
        yield Broken(at=NAME, fact=error.fact, hint=error.hint)


def _name_error(run: Run) -> ModelError | None:
    from evenspan.model.presets import model_preset

    if isinstance(run.config, TextRunConfig):
        wrong = isinstance(run.decoder, ModelError) and run.decoder.code == "M101"
        return run.decoder if wrong else None  # type: ignore[return-value]
    try:
        model_preset(run.config.model_kwargs.model_name)
    except ModelError as error:
        return error
    return None


@rule("M301", "ranks-divide-heads", reads=("sequence_parallel_size", NAME, OVERRIDES))
def ranks_divide_heads(run: Run) -> Iterator[Broken]:
    """Inside attention each context rank holds heads / ranks heads; a remainder has no owner."""
    if run.sizes is None or run.sizes.heads % run.context == 0:
        return
    heads = run.sizes.heads
    legal = [size for size in divisors(heads) if not (run.world_size or size) % size]
    world = f" and {run.world_size} ranks" if run.world_size else ""
    yield Broken(
        at="sequence_parallel_size",
        fact=f"{run.context} ranks do not divide the {heads} attention heads of "
        f"{run.config.model_kwargs.model_name}",
        hint=f"with {heads} heads{world} sequence_parallel_size is {one_of(legal)}",
    )


@rule(
    "M302",
    "channels-agree",
    reads=("image_or_video_shape", NAME, OVERRIDES, "data.codec", "data.kind"),
    task="video",
)
def channels_agree(run: Run) -> Iterator[Broken]:
    """The codec writes the channels that the shape names and the network reads."""
    if run.model is None:
        return
    stated, read, made = run.video.channels, run.model.in_channels, run.model.out_channels
    name = run.video.model_kwargs.model_name
    codec = run.video.data.codec
    written = 3 * codec.spatial**2 * codec.temporal if run.video.data.kind == "video" else read
    codec_text = f"codec {codec.name} (spatial {codec.spatial}, temporal {codec.temporal}) writes {written}"
    if made != read:
        fact = f"the model reads {read} channels and writes {made}"
        yield Broken(at=OVERRIDES, fact=fact, hint=f"override in_channels and out_channels with {stated}")
    if stated != read:
        also = f" and {codec_text}" if written != stated and run.video.data.kind == "video" else ""
        fact = f"{stated} latent channels, but {name} reads {read}{also}"
        shape = list(run.video.image_or_video_shape)
        shape[2] = read
        yield Broken(at="image_or_video_shape", fact=fact, hint=f"use {read} channels: {shape}")
    if written != read and (written != stated or stated == read):
        yield Broken(
            at="data.codec", fact=f"{codec_text} channels, but {name} reads {read}", hint=_codec_hint(read)
        )


def _codec_hint(channels: int) -> str:
    fitting = [
        f"spatial {spatial} with temporal {channels // (3 * spatial**2)}"
        for spatial in (1, 2, 4, 8, 16)
        if channels % (3 * spatial**2) == 0
    ]
    return (
        f"use {one_of(fitting)}"
        if fitting
        else f"no pixel codec writes {channels} channels; change the model"
    )


@rule("M103", "unknown-model-field", reads=(NAME, OVERRIDES))
def overrides_are_fields(run: Run) -> Iterator[Broken]:
    """An override replaces a field of the preset; a name that is no field would change nothing."""
    preset = _preset(run)
    if preset is None:
        return  # M101 has said so
    names = [field.name for field in fields(preset)]
    for name in run.config.model_kwargs.overrides:
        if name not in names:
            near = one_of(nearest(name, names) or names)
            yield Broken(
                at=f"{OVERRIDES}.{name}", fact="is no field of the model", hint=f"did you mean {near}?"
            )


@rule("M102", "model-field-value", reads=(NAME, OVERRIDES))
def override_values_fit(run: Run) -> Iterator[Broken]:
    """An override holds a value of its field's kind, within what the network can be built from."""
    preset = _preset(run)
    if preset is None:
        return
    present = asdict(preset)
    written = run.config.model_kwargs.overrides
    wrong = [name for name, value in written.items() if name in present and not _alike(value, present[name])]
    for name in wrong:
        fact = f"{written[name]!r} replaces {present[name]!r}, which is of another kind"
        yield Broken(at=f"{OVERRIDES}.{name}", fact=fact, hint=f"write a value like {present[name]!r}")
    if wrong or not present.keys() >= written.keys():
        return
    try:
        preset.with_overrides(written)
    except ModelError as error:
        yield Broken(at=OVERRIDES, fact=error.fact, hint=error.hint)


def _preset(run: Run) -> WanConfig | DecoderConfig | None:
    from evenspan.model.presets import model_preset

    if isinstance(run.config, TextRunConfig):
        wanted = run.config.model_kwargs
        return None if wanted.model_path else DECODER_PRESETS.get(wanted.model_name)
    try:
        return model_preset(run.config.model_kwargs.model_name)
    except ModelError:
        return None


def _alike(value: object, present: object) -> bool:
    """Whether `value` may stand where `present` stands."""
    if isinstance(present, tuple):
        return isinstance(value, list) and len(value) == len(present)
    if isinstance(present, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return present is None or type(value) is type(present)
