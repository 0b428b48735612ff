"""The training objective of one micro-batch: flow matching under teacher forcing, as a sum and a count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenspan.attention.clip_pattern import clip_pattern
from evenspan.attention.spans import SpanTable
from evenspan.config.schema import RunConfig
from evenspan.data.batch import VideoBatch
from evenspan.data.draws import DrawKey, batch_indices, batch_normal
from evenspan.model.flow import (
    FlowInputs,
    FlowSchedule,
    LossSum,
    condition_on_frames,
    flow_loss,
    velocity_target,
)
from evenspan.topology.layout import FrameLayout
from evenspan.train.build import attention_window, build_flow_schedule, tokens_per_frame


@dataclass(frozen=True, kw_only=True)
class FlowObjective:
    """What is asked of the model on a batch; one instance serves a whole run.

    Everything random is drawn per (seed, step, sample id, block), so a rank's share is the slice of what one
    process would draw: losses do not depend on the degrees.
    """

    schedule: FlowSchedule
    layout: FrameLayout
    table: SpanTable
    seed: int
    teacher_forcing: bool
    conditioning_frames: int
    """Leading latent frames given clean to the model and left out of the loss: 1 for i2v."""
    augmentation_levels: int
    """The clean copies get noise of the cleanest so many levels of the table; 0 for none."""

    def valid(self, batch: VideoBatch) -> Tensor:
        """[B, F] local: True where a frame counts in the loss."""
        return batch.valid_BF & ~self._conditioning(batch)

    def loss(self, model: torch.nn.Module, batch: VideoBatch, *, step: int) -> LossSum:
        """The weighted squared error of the velocity, summed over this rank's valid frames.

        Flow matching on straight paths (Lipman et al. 2023) with the shifted schedule of Esser et al. 2024.

        `model` is a CausalWan, possibly parallelized; `step` counts optimizer steps from 0.
        """
        index_BF = self._draw_indices(batch, self.schedule.steps, step=step, purpose="timestep")
        noise = self._draw_noise(batch, step=step, purpose="noise")
        latents = batch.latents_BFCHW
        inputs = condition_on_frames(
            FlowInputs(
                noisy_BFCHW=self.schedule.add_noise(latents, noise, index_BF=index_BF),
                timesteps_BF=self.schedule.timestep(index_BF),
                target_BFCHW=velocity_target(latents, noise),
                valid_BF=batch.valid_BF,
            ),
            clean_BFCHW=latents,
            conditioning_BF=self._conditioning(batch),
        )
        clean, clean_timesteps_BF = self._clean_stream(batch, step=step)
        velocity = model(
            inputs.noisy_BFCHW,
            inputs.timesteps_BF,
            batch.text_BNLE,
            positions_BF=self._positions(batch),
            prompt_of_frame_BF=batch.prompt_of_frame_BF,
            table=self.table,
            clean_BFCHW=clean,
            clean_timesteps_BF=clean_timesteps_BF,
        )
        weight_BF = self.schedule.weight(index_BF)
        return flow_loss(velocity, inputs.target_BFCHW, weight_BF=weight_BF, valid_BF=inputs.valid_BF)

    def _clean_stream(self, batch: VideoBatch, *, step: int) -> tuple[Tensor | None, Tensor | None]:
        """The clean copies and their timesteps; slightly noisy ones when augmentation is on."""
        latents = batch.latents_BFCHW
        if not self.teacher_forcing:
            return None, None
        if not self.augmentation_levels:
            return latents, None
        start, stop = self.schedule.augmentation_range(self.augmentation_levels)
        index_BF = start + self._draw_indices(batch, stop - start, step=step, purpose="augmentation level")
        noise = self._draw_noise(batch, step=step, purpose="augmentation noise")
        given_BF = self._conditioning(batch)
        noised = self.schedule.add_noise(latents, noise, index_BF=index_BF)
        clean = torch.where(given_BF[:, :, None, None, None], latents, noised)
        return clean, self.schedule.timestep(index_BF).masked_fill(given_BF, 0.0)

    def _conditioning(self, batch: VideoBatch) -> Tensor:
        """[B, F] local: True where the frame is given to the model clean."""
        return self._positions(batch) < self.conditioning_frames

    def _positions(self, batch: VideoBatch) -> Tensor:
        frames = batch.frames
        positions_F = torch.arange(frames.start, frames.stop, device=batch.latents_BFCHW.device)
        return positions_F.expand(batch.latents_BFCHW.shape[0], -1)

    def _draw_indices(self, batch: VideoBatch, levels: int, *, step: int, purpose: str) -> Tensor:
        return batch_indices(
            levels,
            keys=self._keys(batch, step=step, purpose=purpose),
            frames=batch.frames,
            frame_per_block=self.layout.frame_per_block,
        ).to(batch.latents_BFCHW.device)

    def _draw_noise(self, batch: VideoBatch, *, step: int, purpose: str) -> Tensor:
        latents = batch.latents_BFCHW
        return batch_normal(
            latents.shape[2:],
            keys=self._keys(batch, step=step, purpose=purpose),
            frames=batch.frames,
            frame_per_block=self.layout.frame_per_block,
            dtype=latents.dtype,
        ).to(latents.device)

    def _keys(self, batch: VideoBatch, *, step: int, purpose: str) -> list[DrawKey]:
        return [
            DrawKey(seed=self.seed, purpose=purpose, step=step, epoch=epoch, sample_id=sample_id)
            for sample_id, epoch in zip(batch.sample_ids, batch.epochs, strict=True)
        ]


def build_objective(config: RunConfig, layout: FrameLayout, *, seed: int) -> FlowObjective:
    """The objective that `config` describes on `layout`."""
    return FlowObjective(
        schedule=build_flow_schedule(config),
        layout=layout,
        table=attention_table(config, layout),
        seed=seed,
        teacher_forcing=config.algorithm.teacher_forcing,
        conditioning_frames=1 if config.algorithm.i2v else 0,
        augmentation_levels=config.algorithm.noise_augmentation_max_timestep,
    )


def attention_table(config: RunConfig, layout: FrameLayout) -> SpanTable:
    """Who attends whom, over the tokens of all ranks in the order in which the exchange delivers them."""
    pattern = clip_pattern(
        layout,
        teacher_forced=config.algorithm.teacher_forcing,
        causal=config.algorithm.causal,
        window=attention_window(config),
        sink=config.model_kwargs.sink_size,
    )
    return pattern.scaled(tokens_per_frame(config))
