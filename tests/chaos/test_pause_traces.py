"""A pause is shown with its request's spans of all processes and the lines of the log that name it."""

from __future__ import annotations

import json
import time

from opentelemetry.sdk.trace import TracerProvider

from kvferry.runtime.tracing import _context
from tests.chaos.load import Asked
from tests.chaos.look import traced_pauses
from tests.chaos.queues import describe
from tests.chaos.report import Run
from tests.chaos.tracing import SpanLog, timelines
from tests.toy import make_engine, make_job

TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "1" * 32


def write_spans(path, *names, trace=TRACE, **told):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SpanLog(path))  # type: ignore[arg-type]
    tracer = provider.get_tracer("test")
    for name in names:
        attributes = {f"kvferry.{key}": value for key, value in told.items()}
        span = tracer.start_span(name, context=_context(f"00-{trace}-{trace[:16]}-01"), attributes=attributes)
        span.end()
    provider.shutdown()


def test_a_pause_is_told_by_all_processes_in_order(tmp_path):
    began = time.monotonic()
    write_spans(tmp_path / "router-0.spans", "request", id="cmpl-7")
    write_spans(tmp_path / "prefill-1.spans", "prefill", "ship", attempt=0)
    write_spans(tmp_path / "prefill-0.spans", "prefill", trace=OTHER)
    log = f"{began + 0.5:.2f} router-0: cmpl-7-ab12: node_lost\n{began:.2f} router-0: cmpl-9: done\n"
    (tmp_path / "cluster.log").write_text(log)
    (told,) = timelines(tmp_path, [(TRACE, began, 1.0)])
    shown = [line[9:].split(" id=")[0].split(" attempt=")[0].strip() for line in told]
    assert shown == [
        "router-0: request begins", "router-0: request ends", "prefill-1: prefill begins", "prefill-1: prefill ends",
        "prefill-1: ship begins", "prefill-1: ship ends", "router-0: cmpl-7-ab12: node_lost",
    ]  # fmt: skip
    assert 0.4 < float(told[-1][:9]) <= 0.51


def test_a_line_that_a_killed_process_left_unfinished_is_no_span(tmp_path):
    (tmp_path / "router-0.spans").write_text('{"at": 1.0, "trace": "')
    (tmp_path / "cluster.log").write_text("")
    assert timelines(tmp_path, [(TRACE, 0.0, 1.0)]) == [[]]


def test_the_longest_pause_comes_first(tmp_path):
    (tmp_path / "cluster.log").write_text("")
    asked = [Asked(n, 0.0, 9.0, 8, 0.1, (1.0, float(n)), trace=TRACE) for n in (2, 5, 3)]
    run = Run(1, 1)
    run.stormy.asked = asked
    run.spans = [(0.0, 9.0)]
    heads = [part.split(" s at")[0] for part in traced_pauses(run, tmp_path).strip().split("\n\n")]
    assert heads == ["5.0", "3.0", "2.0"]
    run.late = [(2.5, 5.5)]
    run.stormy.asked.append(Asked(9, 0.0, 9.0, 8, 0.1, (6.0, 2.5), trace=TRACE))
    heads = [part.split(" s at")[0] for part in traced_pauses(run, tmp_path).strip().split("\n\n")]
    assert heads == ["2.5", "5.0", "2.0", "3.0"], "the clients' own loop stood still"


def test_a_pause_shows_what_waited_in_its_nodes(tmp_path):
    engine = make_engine(num_blocks=16)
    engine.reserve("g", make_job("holds", list(range(1, 51))))
    engine.step()
    engine.reserve("h", make_job("waiting", list(range(1, 31))))
    told = describe(engine)
    assert "held by 1 grants" in told
    assert "1 wait, waiting for 8 (due" in told
    began = time.monotonic()
    write_spans(tmp_path / "decode-0.spans", "decode")
    (tmp_path / "cluster.log").write_text("")
    rows = [[began + 0.5, told], [began + 9.0, "later"]]
    (tmp_path / "decode-0.queues").write_text("".join(json.dumps(row) + "\n" for row in rows) + '[1.0, "half')
    (shown,) = timelines(tmp_path, [(TRACE, began, 1.0)])
    assert [line for line in shown if "wait" in line] == [f" +0.500  decode-0: {told}"]
    assert not any("later" in line for line in shown)
