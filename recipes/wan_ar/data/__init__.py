"""The data of this recipe: `evenspan data demo data/demo` for training; smoke runs write their own."""

from pathlib import Path

import av
import numpy as np

SAMPLES, FRAMES, HEIGHT, WIDTH = 2, 48, 96, 128


def smoke_data(directory: Path) -> list[str]:
    """Write two short videos with captions; the settings that read them. Needs no network."""
    for sample in range(SAMPLES):
        video, caption = directory / "video" / f"bar{sample}", directory / "caption" / f"bar{sample}"
        video.mkdir(parents=True)
        caption.mkdir(parents=True)
        (caption / "0.json").write_text('{"caption": "A bar moves to the right."}', encoding="utf-8")
        _write_video(video / "0.mp4", shade=60 + 80 * sample)
    return [f"data.data_path={directory}"]


def _write_video(path: Path, *, shade: int) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for index in range(FRAMES):
            image = np.full((HEIGHT, WIDTH, 3), shade, dtype=np.uint8)
            image[:, 2 * index : 2 * index + 16] = 230
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
