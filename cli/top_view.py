"""Rendering of `kvferry top`: the state of a cluster as text for a terminal of any size.

It escapes names that come from clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress

from rich.console import Group, JustifyMethod, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kvferry.router.dashboard.state import Counts, Node, RequestSummary, State, Suspect
from kvferry.router.dashboard.units import count, named, rate, seconds, share

BAR, LEVELS = 24, " ▁▂▃▄▅▆▇█"
KINDS = (("active", "█", "cyan"), ("granted", "▓", "yellow"), ("cached", "▒", "cyan"), ("free", "·", "dim"))
"""Kinds of blocks: name, character in a bar (legible without colours), and style."""
LINES = {"ship": ("═", "cyan"), "copy": ("┄", "yellow"), "move": ("━", "magenta")}
"""Kinds of transfers: line character and style."""
RECENT_S = 60.0
SPARK = 40
"""Width of a sparkline, in columns."""
WIDE, TALL = 118, 10_000
"""Minimum width that shows all columns, and a height in lines that shows all rows."""
MIN_ROWS = 3
FIXED_LINES = 20
"""Lines of a picture other than rows of nodes, transfers, requests and events."""
QUARANTINED = {"node": "suspected", "ships": "ships suspected", "quarantine": "quarantined"}


def render(state: State, width: int = WIDE, height: int = TALL, trouble: str = "") -> RenderableType:
    """Draw the state for a terminal of `width` columns and `height` lines.

    It shows as many rows as fit, but some of each kind; a narrow terminal omits the least important columns. trouble:
    reason for which the state is outdated."""
    narrow = width < WIDE
    fixed = FIXED_LINES + len(state.nodes) + min(len(state.transfers), MIN_ROWS) + len(state.suspects)
    free_lines = max(3 * MIN_ROWS, height - fixed)
    running = min(len(state.running), free_lines // 3)
    events = min(len(state.events), free_lines // 4)
    parts: list[RenderableType] = [
        _head(state, trouble),
        _numbers(state),
        Rule("nodes", align="left", style="dim"),
        _nodes(state.nodes, several=len(state.models) > 1, narrow=narrow),
        _legend(),
        Rule(f"transfers of the last {seconds(state.transfers_s)}", align="left", style="dim"),
        _transfers(state, MIN_ROWS if height < TALL else len(state.transfers)),
        *map(_suspect, state.suspects),
        Rule(f"in flight: {state.running_total}", align="left", style="dim"),
        _requests(state.running[:running], narrow=narrow),
        Rule("recent requests", align="left", style="dim"),
        _requests(state.recent[: free_lines - running - events], narrow=narrow),
        Rule("events", align="left", style="dim"),
        _events(state, events),
    ]
    return Group(*parts)


def _head(state: State, trouble: str) -> Text:
    models = ", ".join(map(named, state.models))
    head = Text.assemble(("kvferry top", "bold"), f"  {state.router}, version {named(state.version)}, up ")
    head.append(f"{seconds(state.up_s)}, serves {models}")
    if not state.registry:
        head.append("  Redis does not answer", "bold red")
    if trouble:
        head.append(f"  {trouble}", "bold red")
    return head


def _numbers(state: State) -> Table:
    window = Counts.of(state.points)
    recent = Counts.of([point for point in state.points if point.ago_s < RECENT_S])
    missed = sum(window.missed.values())
    pace = count(recent.output / recent.seconds) if recent.seconds >= 1 else "–"
    table = Table.grid(padding=(0, 3))
    table.add_row(
        _pair("in flight", str(state.running_total)),
        _pair("queued", str(state.queued)),
        _pair("tokens/s", pace),
        _pair("TTFT", seconds(recent.first_token_s)),
        _pair("ITL", seconds(recent.itl_s)),
        _pair("requests", count(state.total.requests)),
        _pair("failed", count(state.total.failed), "red" if state.total.failed else ""),
    )
    reasons = ", ".join(f"{named(reason)} {count(tokens)}" for reason, tokens in window.missed.items() if tokens)
    line = Text.assemble("hit rate ", (share(window.hit_rate), "bold cyan"), "  ", (spark(state.points), "cyan"), "  ")
    line.append(f"of {count(sum(window.prompt.values()))} tokens in {seconds(window.seconds)}; missed ")
    line.append(f"{count(missed)} of {count(window.predicted)}" + (f": {reasons}" if reasons else ""))
    outer = Table.grid()
    outer.add_row(table)
    outer.add_row(line)
    outer.add_row(Text.assemble("rejected: ", _reasons(window.refused), "   retries: ", _reasons(window.retries)))
    return outer


def _reasons(numbers: Mapping[str, int]) -> tuple[str, str]:
    """Return the counts by reason as text, and its style."""
    text = ", ".join(
        f"{named(reason).replace('_', ' ')} {count(number)}" for reason, number in numbers.items() if number
    )
    return (text, "red") if text else ("none", "dim")


def spark(points: Sequence[Counts]) -> str:
    """Return the hit rate over time in at most SPARK columns, the latest at the right; blank without prompts."""
    each = max(1, -(-len(points) // SPARK))
    rates = [Counts.of(points[max(0, end - each) : end]).hit_rate for end in range(len(points), 0, -each)][::-1]
    return "".join(" " if found is None else LEVELS[max(1, round(found * (len(LEVELS) - 1)))] for found in rates)


def _pair(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, f"bold {style}".strip()))


def pool(node: Node, width: int = BAR) -> Text:
    """Draw the node's block pool as a bar; a kind with any blocks gets at least one cell, if one is left."""
    blocks, made = node.blocks, Text()
    counts = {"active": blocks.active, "granted": blocks.granted, "cached": blocks.cached}
    total, left = max(1, blocks.total, sum(counts.values())), width
    for kind, sign, style in KINDS[:-1]:
        cells = min(left, max(int(counts[kind] > 0), round(width * counts[kind] / total)))
        made.append(sign * cells, style)
        left -= cells
    return made.append(KINDS[-1][1] * left, KINDS[-1][2])


def _legend() -> Text:
    return Text("  ").join(Text.assemble((sign * 2, style), f" {kind}") for kind, sign, style in KINDS)


def _nodes(nodes: Sequence[Node], *, several: bool, narrow: bool) -> Table:
    rows = Rows("node", "?model" if several else "-", "state", "pool", "?>blocks", ">running", ">waiting", ">own",
                "?>tokens/s", "?>step", narrow=narrow)  # fmt: skip
    for node in nodes:
        limit = f"/{node.most_running}" if node.most_running else ""
        waiting = f"{node.waiting}" + (f" ({count(node.waiting_tokens)} tokens)" if node.waiting_tokens else "")
        healthy = node.state == "ready" and not node.trouble
        rows.add(
            _text(node.id), _text(node.model), _text(node.trouble or node.state, "green" if healthy else "red"),
            pool(node, BAR * 2 // 3 if narrow else BAR), count(node.blocks.total), f"{node.running}{limit}", waiting,
            str(node.streams), count(node.prefill_tokens_per_s), seconds(node.step_s),
        )  # fmt: skip
    return rows.table


def _transfers(state: State, limit: int) -> RenderableType:
    if not state.transfers:
        return Text("none", "dim")
    table = Table.grid(padding=(0, 2))
    highest = max(each.bytes_per_s for each in state.transfers) or 1.0
    for each in state.transfers[:limit]:
        sign, style = LINES[each.kind]
        line = sign * min(10, max(1, round(10 * each.bytes_per_s / highest))) + "▶"
        names = {"ship": "ships", "copy": "copies", "move": "migrations"}
        counts = f"{each.transfers} {names[each.kind]}, {count(each.blocks)} blocks"
        counts += f", {seconds(each.seconds)} each" if each.seconds is not None else ""
        table.add_row(_text(each.source), Text(line, style), _text(each.target), rate(each.bytes_per_s), counts)
    return table


def _suspect(each: Suspect) -> Text:
    where = each.prefill if each.kind == "node" else f"{each.prefill or 'any'} → {each.decode or 'any'}"
    return Text(f"{QUARANTINED[each.kind]}: {named(where)}, {seconds(each.seconds)} more", "red")


def _requests(rows: Sequence[RequestSummary], *, narrow: bool) -> RenderableType:
    if not rows:
        return Text("none", "dim")
    made = Rows("request", "?tenant", "route", ">prompt", ">reused", ">output", "?>first", ">total", "?>retries",
                "outcome", narrow=narrow)  # fmt: skip
    for row in rows:
        route = " → ".join(filter(None, (row.prefill, row.decode))) or "–"
        reused = share(row.cached / row.prompt if row.prompt and row.first_token_s is not None else None)
        healthy = row.outcome in ("running", "done", "cancelled")
        made.add(
            _text(row.id or "another tenant's"), _text(row.tenant), _text(route), str(row.prompt), reused,
            str(row.output), seconds(row.first_token_s), seconds(row.seconds), str(row.retries or ""),
            _text(row.outcome, "" if healthy else "red"),
        )  # fmt: skip
    return made.table


def _events(state: State, limit: int) -> RenderableType:
    if not state.events:
        return Text("none", "dim")
    rows = Rows(">ago", "what", "nodes", "request", "why")
    for event in state.events[:limit]:
        words = (event.kind.replace("_", " "), ", ".join(event.nodes), event.request, event.told)
        rows.add(seconds(event.ago_s), *map(_text, words))
    return rows.table


class Rows:
    """Table with one line per row.

    A head that begins with > is above numbers and aligns right. A narrow terminal omits heads with ?; every terminal
    omits heads with -."""

    def __init__(self, *heads: str, narrow: bool = False) -> None:
        self.table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
        self._kept = [head[0] != "-" and not (narrow and head[0] == "?") for head in heads]
        for head in compress(heads, self._kept):
            name = head.lstrip("?")
            justify: JustifyMethod = "right" if name[0] == ">" else "left"
            self.table.add_column(name.lstrip(">"), justify=justify, no_wrap=True)

    def add(self, *cells: RenderableType) -> None:
        """Add a row with a cell for each head, shown or not."""
        self.table.add_row(*compress(cells, self._kept))


def _text(value: str, style: str = "") -> Text:
    return Text(named(value), style)
