"""Shares of clips from real (tiny) videos: the union of any number of shares is the whole clip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from evenspan.data.batch import VideoSample
from evenspan.data.codec import PixelCodec
from evenspan.data.decode import VideoReader
from evenspan.data.export import write_clip
from evenspan.data.folder import index_folder
from evenspan.data.text import ByteTextEncoder
from evenspan.data.video_dataset import VideoDataset
from evenspan.data.walk import WalkOptions
from evenspan.errors import DataError
from evenspan.topology.layout import FrameLayout, FrameRange

OPTIONS = WalkOptions(frame_per_block=2, fps=12.0, random_start=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sample 0: two videos of 13 and 16 frames; sample 1: one of 40."""
    root = tmp_path_factory.mktemp("videos")
    for name, lengths in {"0": (13, 16), "1": (40,)}.items():
        (root / "caption" / name).mkdir(parents=True)
        for k, length in enumerate(lengths):
            rng = np.random.default_rng(length)
            frames = rng.integers(0, 256, (length, 4, 4, 3), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
            write_clip(root / "video" / name / f"{k}.mp4", frames_THWC=frames, fps=12)
            (root / "caption" / name / f"{k}.json").write_text(json.dumps({"caption": f"shot {k} of {name}"}))
    return root


def dataset(
    root: Path, *, frames: int = 12, temporal: int = 2, options: WalkOptions = OPTIONS, cache_bytes: int = 0
) -> VideoDataset:
    codec = PixelCodec(spatial=4, temporal=temporal)
    return VideoDataset(
        index_folder(root),
        codec=codec,
        latent_shape=(frames, codec.channels, 4, 4),
        text_encoder=ByteTextEncoder(dim=8, length=4),
        options=options,
        seed=1,
        cache_bytes=cache_bytes,
    )


def shares(data: VideoDataset, sample_id: int, *, frames: int, context: int) -> list[VideoSample]:
    layout = FrameLayout(frames=frames, frame_per_block=2, context=context, padding=True)
    return [data.sample(sample_id, epoch=0, frames=layout.share(rank)) for rank in range(context)]


@pytest.mark.parametrize("context", [2, 3, 4, 5])
@pytest.mark.parametrize("temporal", [1, 2])
def test_shares_join_to_the_whole_clip(root: Path, context: int, temporal: int) -> None:
    whole = dataset(root, temporal=temporal).sample(0, epoch=0, frames=FrameRange(0, 12))
    parts = shares(dataset(root, temporal=temporal), 0, frames=12, context=context)
    assert torch.equal(torch.cat([part.latents_FCHW for part in parts])[:12], whole.latents_FCHW)
    assert torch.equal(torch.cat([part.valid_F for part in parts])[:12], whole.valid_F)
    assert torch.equal(torch.cat([part.prompt_of_frame_F for part in parts])[:12], whole.prompt_of_frame_F)
    assert {part.fingerprint for part in parts} == {whole.fingerprint}
    for part in parts:
        assert torch.equal(part.text_NLE, whole.text_NLE)
        past = torch.arange(part.frames.start, part.frames.stop) >= 12
        assert not part.latents_FCHW[past].any()
        assert not part.valid_F[past].any()


def test_pixels_stand_at_their_latents(root: Path) -> None:
    data = dataset(root, frames=6, temporal=1)
    sample = data.sample(1, epoch=0, frames=FrameRange(2, 5))
    pixels = VideoReader(height=16, width=16).read(root / "video" / "1" / "0.mp4", frames=[2, 3, 4])
    decoded = PixelCodec(spatial=4).decode(sample.latents_FCHW)
    assert np.array_equal(decoded.numpy(), pixels)


def test_a_share_decodes_only_its_frames(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[int] = []
    read = VideoReader.read

    def recorded(self: VideoReader, path: Path, *, frames: list[int]) -> np.ndarray:
        wanted.extend(frames)
        return read(self, path, frames=frames)

    monkeypatch.setattr(VideoReader, "read", recorded)
    dataset(root).sample(1, epoch=0, frames=FrameRange(3, 5))
    assert wanted == [5, 6, 7, 8]


def test_shots_follow_their_prompts(root: Path) -> None:
    data = dataset(root, frames=12)
    sample = data.sample(0, epoch=0, frames=FrameRange(0, 12))
    encoder = ByteTextEncoder(dim=8, length=4)
    prompts = ("shot 0 of 0", "The scene transitions. shot 1 of 0", "shot 1 of 0")
    assert torch.equal(sample.text_NLE, encoder.encode(prompts))
    assert sample.prompt_of_frame_F.tolist() == [0] * 6 + [1, 1] + [2] * 4
    assert data.captions(0) == ("shot 0 of 0", "shot 1 of 0")


def test_random_starts_belong_to_seed_epoch_and_sample(root: Path) -> None:
    options = replace(OPTIONS, random_start=True)
    data = dataset(root, frames=4, options=options)
    starts = [data.timeline(1, epoch=epoch).sources[0] for epoch in range(6)]
    again = dataset(root, frames=4, options=options)
    assert starts == [again.timeline(1, epoch=epoch).sources[0] for epoch in range(6)]
    assert len(set(starts)) > 2
    one, two = (data.sample(1, epoch=epoch, frames=FrameRange(0, 1)) for epoch in (0, 1))
    assert (one.fingerprint == two.fingerprint) == (starts[0] == starts[1])


def test_short_samples(root: Path) -> None:
    with pytest.raises(DataError, match=r"D301 sample '0'.*27 frames available.*needs 39"):
        dataset(root, frames=20).sample(0, epoch=0, frames=FrameRange(0, 5))
    padded = dataset(root, frames=20, options=replace(OPTIONS, allow_padding=True))
    sample = padded.sample(0, epoch=0, frames=FrameRange(10, 20))
    assert sample.valid_F.tolist() == [True] * 4 + [False] * 6
    assert torch.equal(sample.latents_FCHW[-1], sample.latents_FCHW[-2])


def test_fingerprint_reads_the_content_not_the_place(root: Path, tmp_path: Path) -> None:
    frames = FrameRange(0, 2)
    first = dataset(root).sample(1, epoch=0, frames=frames).fingerprint
    for kind in ("video", "caption"):
        for file in (root / kind).rglob("*.*"):
            copy = tmp_path / file.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    assert dataset(tmp_path).sample(1, epoch=0, frames=frames).fingerprint == first
    video = tmp_path / "video" / "1" / "0.mp4"
    video.write_bytes(video.read_bytes()[:-1] + b"x")
    assert dataset(tmp_path).sample(1, epoch=0, frames=frames).fingerprint != first


def test_channels_must_be_the_codecs(root: Path) -> None:
    with pytest.raises(DataError, match="D704"):
        VideoDataset(
            index_folder(root),
            codec=PixelCodec(spatial=4),
            latent_shape=(4, 4, 4, 4),
            text_encoder=ByteTextEncoder(dim=8, length=4),
            options=OPTIONS,
        )


def test_a_failing_sample_is_not_replaced(root: Path, tmp_path: Path) -> None:
    for sample in ("0", "1"):
        (tmp_path / "video" / sample).mkdir(parents=True)
        (tmp_path / "caption" / sample).mkdir(parents=True)
        (tmp_path / "caption" / sample / "0.json").write_text('{"caption": "a"}')
    (tmp_path / "video" / "0" / "0.mp4").write_bytes(b"no video")
    (tmp_path / "video" / "1" / "0.mp4").write_bytes((root / "video" / "1" / "0.mp4").read_bytes())
    data = dataset(tmp_path)
    with pytest.raises(DataError, match=r"D201.*video/0/0\.mp4"):
        data.sample(0, epoch=0, frames=FrameRange(0, 2))
    assert data.sample(1, epoch=0, frames=FrameRange(0, 2)).sample_id == 1
