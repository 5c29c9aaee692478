"""A run as a picture: tokens per second over time, with the faults in it. Written by hand, so that it needs nothing."""

from __future__ import annotations

from html import escape

from tests.chaos.report import Run

BIN_S = 0.5
WIDTH, HEIGHT, LEFT, TOP = 1600, 360, 60, 30


def picture(run: Run) -> str:
    """An SVG: tokens per second over time, a line for each fault with its name."""
    span = max(run.spans[-1][1] - run.began, BIN_S)
    bins = [0] * (int(span / BIN_S) + 1)
    for when, tokens in run.stormy.arrivals:
        if 0 <= when - run.began < span:
            bins[int((when - run.began) / BIN_S)] += tokens
    top = max(max(bins), 1)
    across, down = WIDTH - LEFT - 20, HEIGHT - TOP - 90

    def x(seconds: float) -> float:
        return LEFT + across * seconds / span

    def y(tokens: float) -> float:
        return TOP + down * (1 - tokens / top)

    points = " ".join(f"{x(i * BIN_S):.1f},{y(count):.1f}" for i, count in enumerate(bins))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="9">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13">tokens per second under {len(run.done)} faults, seed {run.seed}'
        "</text>",
        f'<text x="4" y="{y(top) + 4:.0f}">{top / BIN_S:.0f}</text><text x="4" y="{y(0):.0f}">0</text>',
    ]
    for done in run.done:
        at, name = x(done.at - run.began), escape(f"{done.fault.kind} {done.fault.target}")
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{TOP + down}" stroke="#d33" stroke-width="0.6"/>'
        )
        parts.append(f'<text transform="translate({at:.1f},{TOP + down + 4}) rotate(60)" font-size="6">{name}</text>')
    parts.append(f'<polyline points="{points}" fill="none" stroke="#236" stroke-width="1.2"/></svg>')
    return "\n".join(parts)
