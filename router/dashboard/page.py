"""Renders the dashboard page and its HTML fragment from a State, with all text escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from kvferry.router.dashboard import charts, flows, units
from kvferry.router.dashboard.state import Counts, State
from kvferry.router.page.policy import headers

_FOLDER = Path(__file__).parent
NEEDS_KEY = '<p class="quiet">This router requires an API key.</p>'
"""Content of the dashboard page if its data needs an API key."""
RECENT_S = 60.0
"""Period of the displayed rates, in seconds; percentages cover the whole history."""


def whole_page(state: State | None) -> Response:
    """Return the page, with the state for browsers without scripts; None if the data needs a key."""
    shell = _templates().get_template("dashboard.html")
    # A constant, or the output of a template with autoescape.
    inner = Markup(NEEDS_KEY) if state is None else Markup(view(state))  # noqa: S704
    return HTMLResponse(shell.render(view=inner), headers=headers(_shell()))


def view(state: State) -> str:
    """Render the part between the page's head and its script."""
    sources, highest = charts.stacked([point.prompt for point in state.points])
    refusals, _ = charts.stacked([point.refused for point in state.points])
    misses, _ = charts.stacked([point.missed for point in state.points])
    window = Counts.of(state.points)
    recent = Counts.of([point for point in state.points if point.ago_s < RECENT_S])
    return (
        _templates()
        .get_template("view.html")
        .render(
            state=state,
            several=len(state.models) > 1,
            sources=sources,
            highest=highest,
            misses=[each for each in misses if each.total],
            refusals=refusals,
            retries={step: number for step, number in window.retries.items() if number},
            hit_path=charts.hit_line(state.points),
            picture=flows.transfers(state.nodes, state.transfers),
            hit=window.hit_rate,
            missed=sum(window.missed.values()) / window.predicted if window.predicted else None,
            predicted=window.predicted,
            window_s=window.seconds,
            pace=recent.output / recent.seconds if recent.seconds >= 1 else None,
            ttft_s=recent.first_token_s,
            itl_s=recent.itl_s,
            rejected=sum(number for why, number in state.total.refused.items() if why.startswith("429")),
        )
    )


@cache
def _shell() -> str:
    return (_FOLDER / "dashboard.html").read_text(encoding="utf-8")


@cache
def _templates() -> Environment:
    environment = Environment(loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {name: getattr(units, name) for name in ("seconds", "count", "rate", "share")}
    environment.filters["bar"] = charts.bar
    return environment
