"""What a run found, as a table for people, as JSON, and as a picture of tokens per second with the faults in it."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tests.chaos.aftermath import Aftermath
from tests.chaos.crowds import apart_from_crowds
from tests.chaos.deeds import Deeds, Done
from tests.chaos.load import RAMP_S, Asked, Ledger, pauses
from tests.chaos.plan import Fault
from tests.chaos.suspicions import Suspicion
from tests.chaos.suspicions import figures as suspected
from tests.chaos.watch import Late, Sample, growth, suspects

GOAL = {"errors": 0, "changed": 0, "leaked": 0, "pause_p99_s": 3.0, "goodput": 70.0, "idle_s": 1.0, "left": 0.9}
FELT_S = 12.0
"""A pause that begins so long after a fault's beginning may still be its."""


@dataclass(frozen=True, slots=True)
class Storm:
    """Clients that went away, of which some were refused or answered before they could; idle_s: see Aftermath."""

    clients: int
    left: int
    refused: int
    idle_s: float | None

    @property
    def weathered(self) -> bool:
        """Whether it was one, and nothing was left of it."""
        enough = self.left >= GOAL["left"] * self.clients
        return enough and self.idle_s is not None and self.idle_s <= GOAL["idle_s"]


@dataclass
class Run:
    """All that was seen. calm: before and after the faults, whose rounds lasted from `spans[i][0]` to `spans[i][1]`
    (monotonic seconds)."""

    seed: int
    streams: int
    calm: list[tuple[Ledger, tuple[float, float]]] = field(default_factory=list)
    stormy: Ledger = field(default_factory=Ledger)
    spans: list[tuple[float, float]] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    spared: list[Fault] = field(default_factory=list)
    after: list[Aftermath] = field(default_factory=list)
    failed: list[Done] = field(default_factory=list)
    late: list[Late] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    disconnects: dict[str, Storm] = field(default_factory=dict)
    suspicions: list[Suspicion] = field(default_factory=list)

    def add(self, ledger: Ledger, span: tuple[float, float], deeds: Deeds, after: Aftermath) -> None:
        """A round is over."""
        self.stormy.asked += ledger.asked
        self.stormy.arrivals += ledger.arrivals
        self.stormy.left += ledger.left
        self.stormy.refused += ledger.refused
        self.spans.append(span)
        self.done += [done for done in deeds.done if not done.failed]
        self.failed += [done for done in deeds.done if done.failed]
        self.spared += deeds.spared
        self.after.append(after)

    @property
    def began(self) -> float:
        return self.spans[0][0]

    @property
    def seconds(self) -> float:
        """Of faults."""
        return sum(ended - began for began, ended in self.spans)


def tokens_per_s(ledger: Ledger, spans: Sequence[tuple[float, float]]) -> float:
    """Tokens that came within these times, but for their first seconds, less those of wrong and broken answers."""
    settled = [(began + RAMP_S + 1.0, ended) for began, ended in spans]
    came = sum(tokens for when, tokens in ledger.arrivals for began, ended in settled if began <= when < ended)
    vain = sum(asked.tokens for asked in ledger.asked if asked.error)
    return (came - vain) / max(sum(ended - began for began, ended in settled), 1e-9)


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def summary(run: Run) -> dict[str, Any]:
    """The figures, by name. Goodput is a share of the better undisturbed part."""
    requests = run.stormy.asked
    through = [asked for asked in requests if asked.router]
    errors = [asked for asked in requests if asked.error and not asked.error.startswith("changed")]
    changed = [asked for asked in requests if asked.error.startswith("changed")]
    paused = pauses((asked for asked in requests if not asked.error), run.late)
    apart = pauses(apart_from_crowds(requests, run.done), run.late)
    calm = pauses((asked for ledger, _ in run.calm for asked in ledger.asked), run.late)
    rate = tokens_per_s(run.stormy, run.spans)
    after_errors = [asked.error for ledger, _ in run.calm[1:] for asked in ledger.asked if asked.error]
    grown = growth(run.samples)
    usual = [tokens_per_s(ledger, [span]) for ledger, span in run.calm]
    found: dict[str, Any] = {
        "seed": run.seed,
        "streams": run.streams,
        "seconds": round(run.seconds, 1),
        "requests": len(requests),
        "left": run.stormy.left,
        "refused": run.stormy.refused,
        "faults": len(run.done),
        "errors": len(errors) + len(after_errors),
        "errors_after": after_errors[:5],
        "errors_by_kind": dict(Counter(asked.error[:70] for asked in errors)),
        "changed": len(changed),
        "changes": [asked.error for asked in changed][:5],
        "through_a_disturbed_router": len(through),
        "resumed": sum(asked.tries > 1 for asked in requests),
        "began_anew": sum(asked.began_anew for asked in requests),
        "leaked": sum(sum(after.leaks.values()) for after in run.after),
        "leaks_by_cause": [after.leaks for after in run.after if after.leaks],
        "books": [after.remains for after in run.after if after.remains],
        "violations": sum(after.violations for after in run.after),
        "health": [after.faults for after in run.after if after.faults],
        "idle_s": None if any(after.idle_s is None for after in run.after) else max(a.idle_s or 0 for a in run.after),
        "pause_p50_s": round(quantile(paused, 0.5), 2),
        "pause_p99_s": round(quantile(paused, 0.99), 2),
        "pause_max_s": round(max(paused, default=0.0), 2),
        "apart_from_crowds": [round(quantile(apart, 0.99), 2), round(max(apart, default=0.0), 2)],
        "calm_pause_p99_s": round(quantile(calm, 0.99), 2),
        "suspicions": suspected(run.suspicions, run.done),
        "tokens_per_s": round(rate, 1),
        "calm_tokens_per_s": [round(each, 1) for each in usual],
        "goodput": round(100 * rate / max(usual), 1) if any(usual) else None,
        "disconnects": {phase: asdict(storm) for phase, storm in run.disconnects.items()},
        "kinds": by_kind(run),
        "failed": [f"{done.fault.kind} {done.fault.target}: {done.note}" for done in run.failed],
        "spared": [f"{fault.kind} {fault.target}" for fault in run.spared],
        "machine": {"cores": os.cpu_count(), "load": round(os.getloadavg()[1], 1)},
        "lag_max_s": round(max((until - since for since, until in run.late), default=0.0), 2),
        "growth": grown,
        "suspects": suspects(grown, run.streams),
    }
    found["goals"] = goals(found)
    if run.disconnects:
        found["goals"]["disconnects"] = all(storm.weathered for storm in run.disconnects.values())
    return found


def by_kind(run: Run) -> dict[str, dict[str, Any]]:
    """Of each kind of fault: how many, the recoveries of its processes, and the longest pause that began within FELT_S
    of one, which may be another's as well."""
    found: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[Done]] = defaultdict(list)
    for done in run.done:
        groups[done.fault.kind].append(done)
    for kind, dones in sorted(groups.items()):
        recovered = [done.recovered_s for done in dones if done.recovered_s is not None]
        felt = [_felt(done, run.done, run.stormy.asked) for done in dones]
        found[kind] = {
            "count": len(dones),
            "recovery_p50_s": round(median(recovered), 1) if recovered else None,
            "recovery_max_s": round(max(recovered), 1) if recovered else None,
            "pause_max_s": round(max((pause for pause, _ in felt), default=0.0), 2),
            "notes": sorted({done.note for done in dones if done.note}),
        }
    return found


def _felt(done: Done, all_done: Sequence[Done], requests: Sequence[Asked]) -> tuple[float, Asked | None]:
    """The longest pause around which no other fault began nearer before its end."""
    worst: tuple[float, Asked | None] = (0.0, None)
    for asked in requests:
        if asked.pause is None:
            continue
        at, length = asked.pause
        if at + length < done.at or at > done.at + FELT_S or length <= worst[0]:
            continue
        nearest = min(all_done, key=lambda other: abs(other.at - at))
        if nearest is done:
            worst = (length, asked)
    return worst


def goals(found: dict[str, Any]) -> dict[str, bool]:
    """Which of the goals this run met."""
    met = {name: (found[name] or 0) <= GOAL[name] for name in ("errors", "changed", "leaked", "pause_p99_s")}
    met["goodput"] = found["goodput"] is not None and found["goodput"] >= GOAL["goodput"]
    met["idle_s"] = found["idle_s"] is not None and found["idle_s"] <= GOAL["idle_s"]
    met["books"] = not found["books"] and not found["violations"] and not found["health"]
    if found["growth"]:
        met["growth"] = not found["suspects"]
    return met


def table(found: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"seed {found['seed']}: {found['requests']} requests of {found['streams']} streams in {found['seconds']} s, "
        f"{found['faults']} faults ({len(found['spared'])} spared, {len(found['failed'])} that could not be had), "
        f"{found['left']} clients left, {found['refused']} were refused before",
        f"  client errors        {found['errors']} {found['errors_by_kind'] or ''}",
        f"  changed answers      {found['changed']} {found['changes'] or ''}",
        f"  leaked blocks        {found['leaked']} {found['leaks_by_cause'] or ''}",
        f"  books at the end     {found['books'] or 'balance'}; idle after {found['idle_s']} s; "
        f"violations {found['violations']:.0f}; health {found['health'] or 'fine'}",
        f"  longest pause        p50 {found['pause_p50_s']} s, p99 {found['pause_p99_s']} s, max "
        f"{found['pause_max_s']} s; apart from crowds p99 {{}} s, max {{}} s".format(*found["apart_from_crowds"]),
        f"                       undisturbed p99 {found['calm_pause_p99_s']} s; the clients' own loop was up to "
        f"{found['lag_max_s']} s late, which is left out",
        f"  suspicions           {_words(found['suspicions'])}",
        f"  goodput              {found['goodput']} % "
        f"({found['tokens_per_s']} of {found['calm_tokens_per_s']} tokens/s)",
        f"  disturbed routers    {found['through_a_disturbed_router']} requests through them; {found['resumed']} were "
        f"taken up again, {found['began_anew']} of them without what was recorded",
        f"  memory, files, threads  {found['suspects'] or ('steady' if found['growth'] else 'too short to tell')}",
        "  idle after clients left  "
        + (", ".join(f"{phase} {_told(storm)}" for phase, storm in found["disconnects"].items()) or "not tried"),
        f"  machine              {found['machine']['cores']} cores, load {found['machine']['load']}",
        f"  {'fault':<22}{'count':>6}{'recovery p50':>14}{'max':>8}{'longest pause':>15}",
    ]
    for kind, row in found["kinds"].items():
        p50, most = (f"{row[key]} s" if row[key] is not None else "-" for key in ("recovery_p50_s", "recovery_max_s"))
        notes = "  " + "; ".join(row["notes"]) if row["notes"] else ""
        lines.append(f"  {kind:<22}{row['count']:>6}{p50:>14}{most:>8}{row['pause_max_s']:>13} s{notes}")
    lines += [f"  could not be had: {told}" for told in found["failed"]]
    lines.append(
        "  goals: " + ", ".join(f"{name} {'met' if met else 'MISSED'}" for name, met in found["goals"].items())
    )
    return "\n".join(lines)


def _words(suspicions: dict[str, int]) -> str:
    return (
        "{begun} second attempts beside nodes that may hang, {false} false; {of_undisturbed_nodes} beside nodes that "
        "no fault had touched, {false_of_undisturbed_nodes} false"
    ).format(**suspicions)


def _told(storm: dict[str, Any]) -> str:
    return f"{storm['idle_s']} s ({storm['left']} of {storm['clients']} left, {storm['refused']} were refused)"
