"""What a configuration becomes before anything is trained."""

from __future__ import annotations

from evenspan.config.schema import RunConfig
from evenspan.topology.from_config import frame_layout
from evenspan.train.build import attention_window, tokens_per_frame
from evenspan.train.objective import attention_table


def config(*, window: int = -1, patch: tuple[int, int, int] = (1, 2, 2)) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model_kwargs": {
                "model_name": "wan-nano",
                "local_attn_size": window,
                "overrides": {"patch_size": list(patch)},
            },
            "image_or_video_shape": [1, 4, 4, 8, 16],
            "data": {"data_path": "somewhere"},
        }
    )


def test_the_attention_table_counts_the_patches_of_the_model() -> None:
    for patch, tokens in (((1, 2, 2), 32), ((1, 4, 2), 16)):
        run = config(patch=patch)
        assert tokens_per_frame(run) == tokens
        layout = frame_layout(run)
        assert attention_table(run, layout).q_tokens == 2 * 4 * tokens


def test_no_window_sees_the_whole_past() -> None:
    assert attention_window(config()) is None
    assert attention_window(config(window=0)) == 0
    assert attention_window(config(window=3)) == 3
