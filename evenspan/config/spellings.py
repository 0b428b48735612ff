"""Other spellings of our settings: LongLive's groups (`infra.`, `data.`, ...) and its flat top-level names.

A spelling renames a setting, translates its value, or is refused by name with what to do instead. Nothing
that LongLive reads is silently ignored. Those of mvp-engine stand in `mvp_engine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Any

from pydantic import BaseModel

from evenspan.config import mvp_engine

Translation = dict[Any, dict[str, Any]]

RENAMED: dict[str, str] = {
    "parallel.mesh.context": "sequence_parallel_size",
    "infra.sequence_parallel_size": "sequence_parallel_size",
    "data.image_or_video_shape": "image_or_video_shape",
    "model.name": "model_kwargs.model_name",
    "model_name": "model_kwargs.model_name",
    "timestep_shift": "model_kwargs.timestep_shift",
    "model.num_frame_per_block": "num_frame_per_block",
    "model_kwargs.num_frame_per_block": "num_frame_per_block",
    "training.max_checkpoints": "checkpoints.max_checkpoints",
    "training.log_iters": "checkpoints.interval",  # LongLive's name for its checkpoint period
    "inference.sampling_steps": "evaluation.sampling_steps",
    "inference.guidance_scale": "evaluation.guidance_scale",
    "generate_interval": "evaluation.interval",
    "vis_interval": "evaluation.interval",
    "inference_num_frames": "evaluation.num_frames",
    "vis_ema": "evaluation.use_ema",
}

TRANSLATED: dict[str, Translation] = {
    "trainer": {"diffusion": {}},
    "infra.mixed_precision": {
        True: {"parallel.mixed_precision": "bf16"},
        False: {"parallel.mixed_precision": "fp32"},
    },
    "infra.gradient_checkpointing": {
        True: {"parallel.activation_checkpointing": "full"},
        False: {"parallel.activation_checkpointing": "none"},
    },
    # One machine holds one copy in both; on several machines set parallel.mesh.replicate to their number.
    "infra.sharding_strategy": {
        "full": {"parallel.mesh.replicate": 1, "parallel.mesh.shard": -1},
        "hybrid_full": {"parallel.mesh.replicate": 1, "parallel.mesh.shard": -1},
        "hybrid_zero2": {
            "parallel.mesh.replicate": 1,
            "parallel.mesh.shard": -1,
            "parallel.backend_kwargs.fsdp2.reshard_after_forward": False,
        },
        "no_shard": {"parallel.mesh.replicate": -1, "parallel.mesh.shard": 1},
    },
    # A given frame never counts in the loss, so with i2v both values mean the same.
    "algorithm.independent_first_frame": {False: {}, True: {"algorithm.i2v": True}},
    "infra.model_quant": {False: {}},
    "data.load_raw_video": {True: {"data.kind": "video"}, False: {"data.kind": "latents"}},
    "model_kwargs.t_scale": {1: {}},
    "model_kwargs.rope_method": {"linear": {}, None: {}},
    "model_kwargs.original_seq_len": {None: {}},
    "inference.multi_shot_sink": {False: {}},
    "inference.multi_shot_rope_offset": {0: {}},
}

REFUSED: dict[str, str] = {
    "infra.generator_fsdp_wrap_strategy": "delete it: every transformer block is one FSDP unit",
    "infra.text_encoder_fsdp_wrap_strategy": "delete it: no text encoder is trained or sharded",
    "infra.vae_halo_latents": "delete it: the pixel codec needs no halo between ranks",
    "infra.*_scale_rule": "delete it: quantised training is not supported; use mixed_precision",
    "training.gc_interval": "delete it: memory is not collected by hand",
    "training.error_recycling*": "see algorithm.noise_augmentation_max_timestep, or delete it",
    "data.eval_data_path": "delete it and write prompts in evaluation.prompts",
    "data.chunks_per_shot": "use data.max_chunks_per_shot",
    "data.dataset_sample_warning_*": "delete it: a sample that cannot be used is an error that names it",
    "inference.sink_size": "delete it: evaluation sees what training sees; set model_kwargs.sink_size",
    "inference.*": "delete it; see the evaluation settings",
    "evaluation.val_batch_size": "delete it: evaluation generates one clip per prompt",
    "evaluation.save_latents_only": "delete it: evaluation writes a clip",
    "logging.wandb_*": "delete it: metrics go to metrics.jsonl and to TensorBoard (logging.tensorboard)",
    "wandb_*": "delete it: metrics go to metrics.jsonl and to TensorBoard (logging.tensorboard)",
    "disable_wandb": "delete it: nothing is sent anywhere",
    "negative_prompt": "delete it: guidance compares with the empty prompt",
    "no_save": "delete it; checkpoints.interval=0 saves only at the end",
    "no_visualize": "set evaluation.interval=0",
    "generate_before_train": "delete it; use `evenspan sample RUN_DIR`",
    "logdir": "give it on the command line: --logdir DIR",
    "config_name": "delete it: a run is named by its --logdir",
    "all_causal": "set algorithm.causal",
    "real_model_kwargs*": "delete it: distillation is not supported",
    "fake_model_kwargs*": "delete it: distillation is not supported",
    "real_guidance_scale": "delete it: distillation is not supported",
    "fake_guidance_scale": "delete it: distillation is not supported",
    "algorithm.denoising_step_list": "delete it: distillation is not supported",
    "algorithm.backward_simulation": "delete it: distillation is not supported",
    "algorithm.denoising_loss_type": "delete it: the loss is flow matching",
}

MESH_SEQUENCE = "parallel.mesh.sequence"
FLATTENED = ("infra", "algorithm", "training", "data", "evaluation", "inference", "logging", "checkpoints")
NEVER_FLAT = (
    "data.kind",
    "evaluation.prompts",
    "evaluation.num_frames",
    "evaluation.interval",
    "logging.interval",
)
"""Names too general to stand without their group."""
FREE_DICTS = ("model_kwargs.overrides",)
"""Settings whose keys are the user's own."""


class Spellings:
    """Every path that a configuration of one schema may hold, and what it means."""

    def __init__(self, schema: type[BaseModel]) -> None:
        self.schema = schema

    @cached_property
    def canonical_paths(self) -> frozenset[str]:
        """Every setting of the schema as a dotted path."""
        return frozenset(_leaves(self.schema, ""))

    @cached_property
    def renames(self) -> dict[str, str]:
        """Spelling -> canonical path, with LongLive's flat names: `lr` is `training.lr`."""
        own = {path: path for path in self.canonical_paths if path.count(".") == 1 and path not in NEVER_FLAT}
        found = {
            **self._flat({**own, **_grouped(self._reaching(RENAMED))}),
            **self._reaching(mvp_engine.RENAMED),
            **self._reaching(RENAMED),
        }
        return {path: target for path, target in found.items() if path not in self._own_settings}

    @cached_property
    def translations(self) -> dict[str, Translation]:
        """Spelling -> value -> canonical settings, with flat names."""
        known = {
            path: table
            for path, table in TRANSLATED.items()
            if all(target in self.canonical_paths for targets in table.values() for target in targets)
        }
        return {**self._flat(_grouped(known)), **mvp_engine.TRANSLATED, **known}

    def refusal(self, path: str) -> tuple[str, str] | None:
        """Whose setting `path` is and what to do instead; None when it is not one we refuse."""
        for pattern, hint in mvp_engine.REFUSED.items():
            if fnmatchcase(path, pattern):
                return "mvp-engine", hint
        for pattern, hint in self._refusals.items():
            if fnmatchcase(path, pattern):
                return "LongLive", hint
        return None

    @cached_property
    def known_spellings(self) -> frozenset[str]:
        """Every path a configuration file may hold."""
        return self.canonical_paths | self.renames.keys() | self.translations.keys()

    @cached_property
    def known_sections(self) -> frozenset[str]:
        """Every proper prefix of a known path: the names that may hold a mapping."""
        refused = {path for path in {**REFUSED, **mvp_engine.REFUSED} if "." in path}
        prefixes = frozenset(prefix for path in self.known_spellings | refused for prefix in _prefixes(path))
        return prefixes | {"model.kwargs", *FREE_DICTS}

    @cached_property
    def _own_settings(self) -> frozenset[str]:
        """Settings that no rename may hide. `parallel.mesh.context` is one and means another."""
        return self.canonical_paths - {"parallel.mesh.context"}

    @cached_property
    def _refusals(self) -> dict[str, str]:
        wide = "inference.*"  # as a flat name this pattern would refuse everything
        return {**REFUSED, **self._flat(_grouped({k: v for k, v in REFUSED.items() if k != wide}))}

    def _reaching(self, table: dict[str, str]) -> dict[str, str]:
        return {path: target for path, target in table.items() if target in self.canonical_paths}

    def _flat(self, table: dict[str, Any]) -> dict[str, Any]:
        """Names without their group, where that names one setting only and is no setting or group of ours."""
        meanings: dict[str, dict[str, Any]] = {}
        for path, value in table.items():
            group, name = path.split(".")
            if group in FLATTENED:
                meanings.setdefault(name, {})[repr(value)] = value
        taken = {path.split(".")[0] for path in self.canonical_paths}
        return {
            name: next(iter(values.values()))
            for name, values in meanings.items()
            if len(values) == 1 and name not in taken
        }


@cache
def spellings_of(schema: type[BaseModel]) -> Spellings:
    """The spellings of `schema`."""
    return Spellings(schema)


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def _grouped(table: dict[str, Any]) -> dict[str, Any]:
    return {
        path: value
        for path, value in table.items()
        if path.split(".")[0] in FLATTENED and path.count(".") == 1
    }


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count])
