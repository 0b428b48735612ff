"""Stored latents come back exactly, by slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from evenspan.data.latents_dataset import LatentsDataset, write_latents
from evenspan.errors import DataError
from evenspan.topology.layout import FrameLayout, FrameRange

SHAPE = (10, 3, 4, 4)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (10, 9):
        generator = torch.Generator().manual_seed(name)
        write_latents(
            tmp_path / f"{name}.safetensors",
            latents_FCHW=torch.randn(SHAPE, generator=generator).to(torch.bfloat16),
            text_NLE=torch.randn(2, 5, 6, generator=generator),
            prompt_of_frame_F=torch.arange(10) // 5,
            valid_frames=8,
        )
    return tmp_path


def test_shares_join_to_the_stored_clip(root: Path) -> None:
    data = LatentsDataset(root, latent_shape=SHAPE, text_shape=(5, 6))
    stored = load_file(root / "9.safetensors")
    assert len(data) == 2
    for context in (1, 2, 3, 4):
        layout = FrameLayout(frames=10, frame_per_block=1, context=context, padding=True)
        parts = [data.sample(0, epoch=0, frames=share) for share in layout.shares]
        joined = torch.cat([part.latents_FCHW for part in parts])
        assert torch.equal(joined[:10], stored["latents"].float())
        assert not joined[10:].any()
        valid = torch.cat([part.valid_F for part in parts])
        assert valid.tolist() == [True] * 8 + [False] * (layout.padded_frames - 8)
        assert torch.cat([part.prompt_of_frame_F for part in parts]).tolist()[:10] == [0] * 5 + [1] * 5
        assert len({part.fingerprint for part in parts}) == 1
        assert torch.equal(parts[-1].text_NLE, stored["text"])


def test_samples_have_fingerprints_of_their_own(root: Path) -> None:
    data = LatentsDataset(root, latent_shape=SHAPE)
    one, two = (data.sample(i, epoch=0, frames=FrameRange(0, 1)).fingerprint for i in (0, 1))
    assert one != two


def test_nothing_to_read(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="D801"):
            LatentsDataset(place, latent_shape=SHAPE)


def test_every_file_that_does_not_fit_is_listed(root: Path) -> None:
    with pytest.raises(DataError, match=r"D803.*2 problems(?s:.)*latents is \[10, 3, 4, 4\], not \[12, 3,"):
        LatentsDataset(root, latent_shape=(12, 3, 4, 4))
    with pytest.raises(DataError, match=r"D803(?s:.)*text is \[2, 5, 6\], not \[2, 5, 7\]"):
        LatentsDataset(root, latent_shape=SHAPE, text_shape=(5, 7))
    path = root / "9.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    save_file({"latents": torch.zeros(SHAPE)}, root / "10.safetensors")
    with pytest.raises(DataError, match="D802") as caught:
        LatentsDataset(root, latent_shape=SHAPE)
    assert "10.safetensors: text is missing" not in str(caught.value)
    assert "text is missing" in str(caught.value)
    assert "9.safetensors" in str(caught.value)


def test_prompts_must_exist(root: Path) -> None:
    write_latents(
        root / "9.safetensors",
        latents_FCHW=torch.zeros(SHAPE),
        text_NLE=torch.zeros(1, 5, 6),
        prompt_of_frame_F=torch.arange(10),
    )
    with pytest.raises(DataError, match=r"D804.*from 0 to 9.*1 prompts"):
        LatentsDataset(root, latent_shape=SHAPE).sample(0, epoch=0, frames=FrameRange(0, 1))


@pytest.mark.parametrize("valid", ["x", "-1", "11", "1.5", "", "9" * 5000])
def test_the_number_of_valid_frames_is_one_of_the_clip(root: Path, valid: str) -> None:
    path = root / "9.safetensors"
    save_file(load_file(path), path, metadata={"valid_frames": valid})
    with pytest.raises(DataError, match=r"D803(?s:.)*valid_frames is .*, not one of 0 to 10"):
        LatentsDataset(root, latent_shape=SHAPE)
