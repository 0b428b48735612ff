"""Clips encoded once and stored: one safetensors file a sample, of which each rank reads only its share.

    <root>/<sample>.safetensors   latents [F, C, H, W], text [N, L, E], prompt_of_frame [F]

The files are memory mapped; a slice along F costs what it holds, not what the file holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from evenspan.data.batch import VideoSample
from evenspan.data.fingerprint import combined_fingerprint, file_fingerprint
from evenspan.data.folder import listed_problems, natural_key
from evenspan.errors import DataError, Finding
from evenspan.topology.layout import FrameRange

NAMES = ("latents", "prompt_of_frame", "text")


class LatentsDataset:
    """Shares of stored clips as fp32. A sample that fails raises; it is never replaced by another."""

    def __init__(
        self,
        root: Path | str,
        *,
        latent_shape: tuple[int, int, int, int],
        text_shape: tuple[int, int] | None = None,
    ) -> None:
        """`latent_shape` is the global [F, C, H, W] of every file; `text_shape` its [L, E], if checked.

        Raises DataError D801 when `root` has no files, D802 or D803 listing every file that does not fit.
        """
        self._root = Path(root)
        self._shape = latent_shape
        files = self._root.glob("*.safetensors") if self._root.is_dir() else ()
        self._paths = sorted((path for path in files if path.name[0] != "."), key=natural_key)
        if not self._paths:
            raise DataError(
                "D801",
                f"{self._root} has no .safetensors files",
                hint="point data.data_path at files of evenspan.data.latents_dataset.write_latents",
            )
        findings = [
            finding
            for path in self._paths
            for finding in _problems(path, latent_shape=latent_shape, text_shape=text_shape)
        ]
        if findings:
            raise listed_problems(self._root, findings)
        self._fingerprints: dict[Path, bytes] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def sample(self, sample_id: int, *, epoch: int, frames: FrameRange) -> VideoSample:
        """The share `frames` (global latent frames, padded ones included): latents [F local, C, H, W] fp32.

        Padded frames are zero, invalid, and follow the last frame's prompt.
        """
        path = self._paths[sample_id]
        total = self._shape[0]
        real = frames.intersect(FrameRange(0, total))
        latents = torch.zeros(frames.count, *self._shape[1:])
        with safe_open(str(path), framework="pt") as file:
            if real.count:
                stored = file.get_slice("latents")[real.start : real.stop]
                latents[real.start - frames.start : real.stop - frames.start] = stored.to(torch.float32)
            text = file.get_tensor("text").to(torch.float32)
            prompts = file.get_tensor("prompt_of_frame").to(torch.long)
            if prompts.min() < 0 or prompts.max() >= text.shape[0]:
                raise DataError(
                    "D804",
                    f"{path}: prompt_of_frame reaches from {prompts.min()} to {prompts.max()}, "
                    f"the file has {text.shape[0]} prompts",
                    hint="encode the sample again",
                )
            valid = int((file.metadata() or {}).get("valid_frames", total))
        at = torch.arange(frames.start, frames.stop)
        return VideoSample(
            latents_FCHW=latents,
            frames=frames,
            valid_F=at < min(valid, total),
            sample_id=sample_id,
            epoch=epoch,
            text_NLE=text,
            prompt_of_frame_F=prompts[at.clamp(max=total - 1)],
            fingerprint=self._fingerprint(sample_id),
        )

    def _fingerprint(self, sample_id: int) -> bytes:
        path = self._paths[sample_id]
        if path not in self._fingerprints:
            self._fingerprints[path] = file_fingerprint(path)
        return combined_fingerprint([sample_id, path.name, self._fingerprints[path]])


def _problems(
    path: Path, *, latent_shape: tuple[int, int, int, int], text_shape: tuple[int, int] | None
) -> Iterator[Finding]:
    """What is wrong with a file, from its header alone."""
    try:
        with safe_open(str(path), framework="pt") as file:
            names = set(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in NAMES if name in names}
            valid = (file.metadata() or {}).get("valid_frames", str(latent_shape[0]))
    except (SafetensorError, OSError) as error:
        fact = f"the file is truncated or not safetensors: {error}"
        yield Finding(code="D802", at=str(path), fact=fact, hint="encode the sample again")
        return
    wrong = [f"{name} is missing" for name in NAMES if name not in shapes]
    wanted: dict[str, tuple[int, ...]] = {"latents": latent_shape, "prompt_of_frame": latent_shape[:1]}
    if "text" in shapes:
        wanted["text"] = (*shapes["text"][:1], *(text_shape or shapes["text"][1:3]))
    wrong += [
        f"{name} is {list(shapes[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != tuple(shape)
    ]
    if valid not in map(str, range(latent_shape[0] + 1)):
        wrong.append(f"valid_frames is {valid[:20]!r}, not one of 0 to {latent_shape[0]}")
    if wrong:
        hint = "set image_or_video_shape to the stored [F, C, H, W], or encode the data again"
        yield Finding(code="D803", at=str(path), fact="; ".join(wrong), hint=hint)


def write_latents(
    path: Path,
    *,
    latents_FCHW: Tensor,
    text_NLE: Tensor,
    prompt_of_frame_F: Tensor,
    valid_frames: int | None = None,
) -> None:
    """Store one sample at `path`, whole or not at all; `valid_frames` counts the real frames, or is all."""
    frames = latents_FCHW.shape[0]
    assert prompt_of_frame_F.shape == (frames,), "one prompt index per latent frame"
    part = path.with_name(f".{path.name}.part")
    save_file(
        {
            "latents": latents_FCHW.contiguous(),
            "text": text_NLE.contiguous(),
            "prompt_of_frame": prompt_of_frame_F.to(torch.long).contiguous(),
        },
        str(part),
        metadata={"valid_frames": str(frames if valid_frames is None else valid_frames)},
    )
    part.replace(path)
