"""From a checked configuration to the parts of a run: layout, model, data."""

from __future__ import annotations

from pathlib import Path

from evenspan.config.schema import RunConfig
from evenspan.config.tasks import AnyRunConfig
from evenspan.data.codec import PixelCodec
from evenspan.data.folder import index_folder
from evenspan.data.latents_dataset import LatentsDataset
from evenspan.data.sampler import SampleSchedule
from evenspan.data.text import ByteTextEncoder
from evenspan.data.video_dataset import VideoDataset
from evenspan.data.walk import WalkOptions
from evenspan.model.flow import FlowSchedule
from evenspan.model.initialize import init_weights
from evenspan.model.presets import model_preset
from evenspan.model.wan import CausalWan
from evenspan.model.wan_config import WanConfig
from evenspan.topology.mesh import Topology
from evenspan.train.place import place


def model_config(config: RunConfig) -> WanConfig:
    """The preset's sizes with the configuration's overrides."""
    preset = model_preset(config.model_kwargs.model_name)
    return preset.with_overrides(config.model_kwargs.overrides)


def tokens_per_frame(config: RunConfig) -> int:
    """Tokens of one latent frame."""
    return model_config(config).tokens_per_frame(config.latent_height, config.latent_width)


def attention_window(config: RunConfig) -> int | None:
    """Latent frames that a block sees before itself; None for the whole past."""
    size = config.model_kwargs.local_attn_size
    return None if size < 0 else size


def build_flow_schedule(config: RunConfig) -> FlowSchedule:
    """The noise levels of training and of generation."""
    return FlowSchedule(shift=config.model_kwargs.timestep_shift, steps=config.algorithm.num_train_timestep)


def build_model(config: RunConfig, topology: Topology) -> CausalWan:
    """A CausalWan with the same initial weights at any degrees, as this rank's part on `topology`.

    Weights and optimizer state are fp32 for fp32 and bf16 runs (bf16 is what FSDP2 computes in), fp64 for
    fp64.
    """
    model = CausalWan(model_config(config), core=config.parallel.attention)
    init_weights(model, seed=config.logging.seed)
    model.to(topology.device)
    place_model(model, config, topology)
    return model


def place_model(model: CausalWan, config: RunConfig, topology: Topology) -> None:
    """Parallelize `model` in place as `config.parallel` says."""
    place(
        model,
        config.parallel,
        topology,
        blocks=model.blocks,
        attention="attn1",
        heads=model.config.num_attention_heads,
        # Upstream computes the time embedding in fp32 under bf16 too.
        fp32_modules=model.fp32_modules(),
    )


def open_dataset(config: RunConfig) -> VideoDataset | LatentsDataset:
    """The samples under `data.data_path`. Raises DataError naming every file that does not fit."""
    data = config.data
    frames, channels, height, width = config.image_or_video_shape[1:]
    shape = (frames, channels, height, width)
    if data.kind == "latents":
        text_shape = (data.text.length, model_config(config).text_dim)
        return LatentsDataset(Path(data.data_path), latent_shape=shape, text_shape=text_shape)
    return VideoDataset(
        index_folder(Path(data.data_path)),
        codec=build_codec(config),
        latent_shape=shape,
        text_encoder=build_text_encoder(config),
        options=WalkOptions(
            frame_per_block=config.num_frame_per_block,
            fps=data.fps,
            allow_padding=data.allow_padding,
            min_latent_frames=data.min_latent_frames,
            uniform_prompt=data.uniform_prompt,
            max_chunks_per_shot=data.max_chunks_per_shot,
            scene_cut_prefix=data.scene_cut_prefix,
            random_start=data.random_start,
        ),
        seed=config.logging.seed,
    )


def build_codec(config: RunConfig) -> PixelCodec:
    """What turns pixels into latents and back."""
    return PixelCodec(spatial=config.data.codec.spatial, temporal=config.data.codec.temporal)


def build_text_encoder(config: RunConfig) -> ByteTextEncoder:
    """What turns a prompt into the model's text width."""
    return ByteTextEncoder(dim=model_config(config).text_dim, length=config.data.text.length)


def build_schedule(config: AnyRunConfig, *, size: int, dp_degree: int) -> SampleSchedule:
    """Which of `size` samples each step takes, over all replicas."""
    training = config.training
    return SampleSchedule(
        size=size,
        seed=config.logging.seed,
        global_batch=training.batch_size * training.gradient_accumulation_steps * dp_degree,
    )
