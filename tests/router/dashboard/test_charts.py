"""What the page draws, as numbers."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from kvferry.router.dashboard import units
from kvferry.router.dashboard.charts import CHART, COLUMNS, bar, hit_line, stacked
from kvferry.router.dashboard.state import Blocks, Counts


def counts(computed: int, reused: int = 0) -> Counts:
    prompt = {"computed": computed, "reused_prefill": reused}
    return Counts(
        ago_s=0, seconds=5, requests=1, failed=0, prompt=prompt, predicted=0, missed={}, output=0, first_tokens=0,
        first_token_s=None,
    )  # fmt: skip


@pytest.mark.parametrize("total", [10, 0, 100])
def test_a_bars_parts_follow_each_other_and_never_leave_it(total: int) -> None:
    parts = bar(Blocks(active=1, cached=2, granted=3, free=4, total=total))
    assert [part.kind for part in parts] == ["active", "granted", "cached", "free"]
    for part, following in pairwise(parts):
        assert part.at + part.width == pytest.approx(following.at)
    assert parts[-1].at + parts[-1].width == pytest.approx(100 if total <= 10 else 10)
    assert bar(Blocks(active=0, cached=0, granted=0, free=0, total=0))[-1].width == 0


def test_columns_stand_on_each_other_with_the_latest_at_the_right_edge() -> None:
    series, highest = stacked([{"a": 0, "b": 0}, {"a": 30, "b": 10}, {"a": 10, "b": 10}])
    assert highest == 40
    assert [(each.kind, each.total) for each in series] == [("a", 40), ("b", 20)]
    a, b = (re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", each.path) for each in series)
    assert [(float(x), float(y), float(tall)) for x, y, _, tall in a] == [(590, 30, 90), (595, 90, 30)]
    assert [(float(x), float(y), float(tall)) for x, y, _, tall in b] == [(590, 0, 30), (595, 60, 30)]
    many, _ = stacked([{"a": 1}] * (COLUMNS + 50))
    assert many[0].total == COLUMNS
    assert many[0].path.startswith("M0.0 ")


def test_the_hit_rate_is_drawn_where_there_were_prompts() -> None:
    assert hit_line([counts(0), counts(75, 25), counts(0), counts(0, 10)]) == f"M587.5 {CHART[1] * 0.75:.1f}L597.5 0.0"
    assert hit_line([]) == hit_line([counts(0)]) == ""


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (units.seconds(None), "–"), (units.seconds(0.0042), "4.2 ms"), (units.seconds(0.25), "250 ms"),
        (units.seconds(3.21), "3.2 s"), (units.seconds(59), "59 s"), (units.seconds(125), "2 m 05 s"),
        (units.seconds(600.2), "10 m"),
        (units.seconds(7300), "2 h 01 m"), (units.seconds(400_000), "4 d 15 h"), (units.count(999), "999"),
        (units.count(9_999), "9,999"), (units.count(12_345), "12.3 k"), (units.count(4.5e6), "4.5 M"),
        (units.rate(512), "512 B/s"), (units.rate(3.2e6), "3.2 MB/s"), (units.rate(2e9), "2 GB/s"),
        (units.share(None), "–"), (units.share(0.125), "12.5 %"), (units.share(1), "100 %"),
        (units.named("a\x1b[31mb\n"), "a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}"),
    ],
)  # fmt: skip
def test_numbers_are_shown_as_people_read_them(made: str, shown: str) -> None:
    assert made == shown
