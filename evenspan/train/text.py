"""The text task: next-token prediction on packed documents with a Hugging Face decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from evenspan.config.text_schema import TextRunConfig
from evenspan.data.text_batch import TextBatch, TextSample, collate_text
from evenspan.data.text_corpus import find_documents
from evenspan.data.text_dataset import PackedTextDataset
from evenspan.data.tokenizer import Tokenizer, open_tokenizer
from evenspan.errors import ModelError
from evenspan.model.decoder import build_decoder, decoder_class, load_decoder, use_cores
from evenspan.model.decoder_config import DecoderConfig, decoder_config
from evenspan.parallel.plan import Mode, parse_plan
from evenspan.topology.degrees import Axis, Degrees
from evenspan.topology.from_config import token_layout
from evenspan.topology.layout import FrameLayout
from evenspan.topology.mesh import Topology
from evenspan.train.place import place
from evenspan.train.text_objective import TextObjective


class TextTask:
    """See `Task`."""

    unit = "tokens"
    evaluation_interval = 0
    evaluates_average = False

    def __init__(self, config: TextRunConfig, degrees: Degrees) -> None:
        self.config = config
        self.degrees = degrees

    @cached_property
    def layout(self) -> FrameLayout:
        """Which context rank holds which tokens. Raises ShapeError S201."""
        return token_layout(self.config, self.degrees)

    @cached_property
    def sizes(self) -> DecoderConfig:
        """The decoder's sizes. Raises ModelError."""
        return text_model_config(self.config)

    @cached_property
    def dataset(self) -> PackedTextDataset:
        """The packed documents. Raises DataError D901 to D907, ModelError M110."""
        data = self.config.data
        tokenizer = open_tokenizer(data.tokenizer)
        check_vocabulary(tokenizer, self.sizes, name=data.tokenizer)
        return PackedTextDataset(
            find_documents(data.data_path, pattern=data.pattern),
            tokenizer=tokenizer,
            sequence_length=data.sequence_length,
            padded_length=self.layout.padded_frames,
        )

    @property
    def tokens_per_sample(self) -> int:
        """Real tokens of a sample."""
        return self.layout.frames

    def collate(self, samples: Sequence[TextSample]) -> TextBatch:
        """The samples as one batch. Raises DataError D701."""
        return collate_text(samples)

    def build_model(self, topology: Topology) -> nn.Module:
        """This rank's part of the decoder: of `model_path`, or with weights drawn from the run's seed."""
        folder = self.config.model_kwargs.model_path
        model = (
            build_decoder(self.sizes, seed=self.config.logging.seed)
            if folder is None
            else load_decoder(folder)
        )
        use_cores(model, self.config.parallel.attention)
        model.train().to(topology.device)
        place(
            model,
            self.config.parallel,
            topology,
            blocks=model.model.layers,
            attention="self_attn",
            heads=self.sizes.num_attention_heads,
        )
        return model

    def build_objective(self, topology: Topology) -> TextObjective:
        """Cross entropy over logits that are split over the tensor ranks if the model's plan says so."""
        sequence_parallel = self.config.parallel.backend_kwargs.sequence_parallel
        plan = parse_plan(decoder_class(), sequence_parallel=sequence_parallel)
        split = any(rule.mode is Mode.LOSS_PARALLEL for rule in plan.rules)
        return TextObjective(vocabulary_group=topology.group(Axis.TENSOR) if split else None)

    def local_shape(self, topology: Topology) -> list[int]:
        """[B, T local] of the tokens."""
        share = self.layout.share(topology.coordinates.context)
        return [self.config.training.batch_size, share.count]

    def evaluate(
        self, weights: Mapping[str, Tensor], *, name: str, directory: Path, device: torch.device
    ) -> Iterator[dict[str, object]]:
        """Nothing."""
        del weights, name, directory, device
        return iter(())


def text_model_config(config: TextRunConfig) -> DecoderConfig:
    """The decoder's sizes: of the preset with its overrides, or of the folder. Raises ModelError."""
    wanted = config.model_kwargs
    return decoder_config(wanted.model_name, model_path=wanted.model_path, overrides=wanted.overrides)


def check_vocabulary(tokenizer: Tokenizer, sizes: DecoderConfig, *, name: str) -> None:
    """Raise ModelError M110 for a tokenizer with more ids than the model has embeddings."""
    if tokenizer.vocab_size > sizes.vocab_size:
        raise ModelError(
            "M110",
            f"tokenizer {name} has {tokenizer.vocab_size} ids, the model a vocabulary of {sizes.vocab_size}",
            hint=f"write model_kwargs.overrides.vocab_size={-(-tokenizer.vocab_size // 8) * 8}, "
            "or use the model's own tokenizer",
        )
