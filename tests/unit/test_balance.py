import json
import subprocess
import sys

import pytest

from evenspan.config.schema import RunConfig
from evenspan.errors import CommError
from evenspan.planner.balance import BalanceInputs, balance_report, count_work
from evenspan.topology.degrees import Degrees
from evenspan.topology.layout import FrameLayout

SHIPPED = {
    "sequence_parallel_size": 4,
    "num_frame_per_block": 8,
    "image_or_video_shape": [1, 96, 48, 44, 80],
    "data": {"data_path": "data"},
    "parallel": {"mixed_precision": "bf16"},
}


def _inputs(**changes):
    values = {
        "degrees": Degrees(context=2),
        "layout": FrameLayout(frames=4, frame_per_block=2, context=2),
        "batch": 1,
        "tokens_per_frame": 3,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 5,
        "bytes_per_element": 4,
    }
    return BalanceInputs(**{**values, **changes})


def test_shipped_run_is_even():
    report = balance_report(RunConfig.model_validate(SHIPPED), 8)
    assert len(report.ranks) == 8
    assert set(report.max_over_mean.values()) == {1.0}
    work = report.ranks[5]
    assert (work.frames, work.tokens, work.loss_tokens) == (24, 2 * 24 * 880, 24 * 880)
    # 12 blocks of 8: clean 12 * 13 / 2 block pairs, noisy the same number; 6 of 24 heads inside.
    assert work.attention_pairs == 12 * 13 * (8 * 880) ** 2 * 6
    # 1557 MB per layer by the closed form, 168,960 clean and noisy tokens, width 3072, bf16.
    assert work.exchanged_bytes == 30 * 8 * 3072 * 168_960 * 2 * 3 // 16
    assert round(work.exchanged_bytes / 30 / 1e6) == 1557


def test_pairs_counted_by_hand():
    """Two blocks of 2 frames: clean sees 1 + 2 blocks, noisy itself and 0 + 1 clean ones: 6 block pairs."""
    work = count_work(_inputs()).ranks[0]
    assert work.attention_pairs == 6 * 4 * 9 * 2
    assert work.exchanged_bytes == 2 * 4 * (20 + 20) * 24 * 4 // 4


def test_padding_and_first_frame_show_as_imbalance():
    layout = FrameLayout(frames=81, frame_per_block=8, context=4, padding=True)
    report = count_work(
        _inputs(degrees=Degrees(context=4), layout=layout, tokens_per_frame=2, first_frame_given=True)
    )
    assert [work.frames for work in report.ranks] == [21, 21, 21, 18]
    assert [work.tokens for work in report.ranks] == [84] * 4
    assert [work.loss_tokens for work in report.ranks] == [40, 42, 42, 36]
    assert report.max_over_mean["frames"] == pytest.approx(21 * 4 / 81)
    assert report.max_over_mean["tokens"] == 1.0


@pytest.mark.parametrize(
    ("changes", "frame_pairs"),
    [
        ({"teacher_forcing": False}, 4 + 8),
        ({"teacher_forcing": False, "causal": False}, 16),
        ({"teacher_forcing": False, "window": 0}, 8),
        ({"window": 0}, 16),
        ({"window": 0, "sink": 1}, 16 + 4),
    ],
)
def test_other_patterns(changes, frame_pairs):
    assert count_work(_inputs(**changes)).ranks[0].attention_pairs == frame_pairs * 9 * 2


def test_one_rank_exchanges_nothing():
    report = count_work(
        _inputs(degrees=Degrees(shard=2), layout=FrameLayout(frames=4, frame_per_block=2, context=1))
    )
    assert [work.exchanged_bytes for work in report.ranks] == [0, 0]
    assert report.max_over_mean["exchanged_bytes"] == 1.0


def test_few_kv_heads_are_copied():
    work = count_work(
        _inputs(
            degrees=Degrees(context=4),
            kv_heads=2,
            layout=FrameLayout(frames=4, frame_per_block=1, context=4),
        )
    ).ranks[0]
    assert work.exchanged_bytes == 2 * 4 * (20 + 20) * 24 * 4 * 3 // 16


def test_heads_that_do_not_split_are_refused():
    with pytest.raises(CommError, match="4 query heads cannot be shared by 3 context ranks"):
        count_work(
            _inputs(degrees=Degrees(context=3), layout=FrameLayout(frames=6, frame_per_block=2, context=3))
        )


def test_json_and_text_forms():
    report = balance_report(RunConfig.model_validate(SHIPPED), 4)
    data = json.loads(json.dumps(report.as_json()))
    assert set(data) == {"ranks", "max_over_mean"}
    keys = {"frames", "tokens", "loss_tokens", "attention_pairs", "exchanged_bytes"}
    assert all(set(row) == keys for row in [*data["ranks"], data["max_over_mean"]])
    lines = report.as_text().splitlines()
    assert len(lines) == 1 + 4 + 1
    assert lines[1].split()[:4] == ["0", "24", "42,240", "21,120"]
    assert lines[-1].split() == ["max/mean"] + ["1.000"] * 5


def test_it_does_not_import_torch():
    code = "import sys, evenspan.planner.balance; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
