"""Decoding a share gives the pixels of the full decode; damaged files are named."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from evenspan.data.decode import VideoReader, scan_video
from evenspan.errors import DataError


def write_video(
    path: Path,
    *,
    frames: int = 24,
    fps: int = 12,
    size: tuple[int, int] = (32, 32),
    gop: int = 8,
    faststart: bool = False,
) -> np.ndarray:
    """A moving gradient with noise, H.264 with B-frames: [T, H, W, 3]."""
    height, width = size
    rng = np.random.default_rng(frames)
    ramp = np.arange(height)[:, None, None] * 3 + np.arange(width)[None, :, None] * 2
    pixels = np.stack([(ramp + 7 * t + rng.integers(0, 30, (height, width, 3))) % 256 for t in range(frames)])
    pixels = pixels.astype(np.uint8)
    options = {"movflags": "faststart"} if faststart else {}
    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream("libx264", rate=fps, options={"g": str(gop), "bf": "2", "crf": "18"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return pixels


def reader(**changes: object) -> VideoReader:
    return VideoReader(**{"height": 32, "width": 32, **changes})  # type: ignore[arg-type]


def test_scan_counts_without_decoding(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4")
    info = scan_video(tmp_path / "a.mp4")
    assert (info.frames, info.fps, info.keys[0]) == (24, Fraction(12), 0)
    assert len(info.keys) >= 3


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "mov"])
def test_a_share_is_the_slice_of_the_full_decode(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    original = write_video(path)
    full = reader().read(path, frames=range(24))
    assert full.shape == (24, 32, 32, 3)
    assert np.abs(full.astype(int) - original).mean() < 20
    for start, stop in [(0, 6), (6, 12), (7, 9), (15, 24), (23, 24)]:
        part = reader(cache_bytes=0).read(path, frames=range(start, stop))
        assert np.array_equal(part, full[start:stop])


def test_any_order_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write_video(path)
    full = reader().read(path, frames=range(24))
    wanted = [20, 3, 3, 11]
    for cache_bytes in (0, 1 << 20):
        kept = reader(cache_bytes=cache_bytes)
        for _ in range(2):
            assert np.array_equal(kept.read(path, frames=wanted), full[wanted])
    assert reader().read(path, frames=[]).shape == (0, 32, 32, 3)


def test_a_cache_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write_video(path)
    kept = reader(cache_bytes=5 * 32 * 32 * 3)
    kept.read(path, frames=range(24))
    assert len(kept._cache) == 5


def test_crop_keeps_the_aspect(tmp_path: Path) -> None:
    path = tmp_path / "wide.mp4"
    write_video(path, frames=3, size=(32, 96))
    full = reader(width=96).read(path, frames=[1])
    cropped = reader().read(path, frames=[1])
    assert np.array_equal(cropped, full[:, :, 32:64])
    stretched = reader(fit="stretch").read(path, frames=[1])
    assert stretched.shape == cropped.shape
    assert not np.array_equal(stretched, cropped)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.mp4"
    with pytest.raises(DataError, match=r"D201.*bad\.mp4"):
        scan_video(path)
    path.write_bytes(b"this is not a video" * 50)
    with pytest.raises(DataError, match=r"D201.*bad\.mp4"):
        scan_video(path)
    write_video(path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match=r"D201.*bad\.mp4"):
        scan_video(path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short.mp4"
    write_video(path, frames=48, faststart=True)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match=r"D203.*short\.mp4.*of its 48 frames"):
        scan_video(path)


def test_a_damaged_picture_is_named_with_its_frame(tmp_path: Path) -> None:
    path = tmp_path / "damaged.mp4"
    write_video(path, frames=48)
    full = reader().read(path, frames=range(48))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 1500] = bytes(byte ^ 0x5A for byte in content[middle : middle + 1500])
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"D202.*damaged\.mp4: frame \d+ of 48"):
        reader().read(path, frames=range(48))
    # A rank whose frames are sound does not notice.
    assert np.array_equal(reader().read(path, frames=range(4)), full[:4])


def test_pictures_the_decoder_would_patch_up_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "patched.mp4"
    write_video(path, frames=48)
    sound = path.read_bytes()
    start, stop = sound.find(b"mdat") + 900, sound.find(b"moov") - 200
    silent = refused = 0
    for at in range(start, stop, (stop - start) // 20):
        path.write_bytes(sound[:at] + bytes(byte ^ 0x5A for byte in sound[at : at + 40]) + sound[at + 40 :])
        try:
            with av.open(str(path)) as container:
                silent += sum(1 for _ in container.decode(video=0)) == 48
        except av.FFmpegError:
            continue
        try:
            reader().read(path, frames=range(48))
        except DataError:
            refused += 1
    assert silent > 0
    assert refused > 0, "damage that a plain decode hides must be told"
