"""Main program of the sandboxed child process that renders one model's chat templates, one prompt at a time.

Its parent (renderer.py) writes frames (render_frames.py): first the templates' sources, then one set of variables a
frame. The child answers each frame, and exits at the end of its input. The kernel bounds its memory and CPU time."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jinja2.environment import Template

from kvferry.model_files.template_language import environment
from kvferry.model_files.template_sandbox import Sandbox
from kvferry.router.text.render_frames import (
    DEADLINE_S,
    ERROR,
    MEMORY,
    MEMORY_SPENT,
    READY,
    TEXT,
    TOO_LONG,
    answer,
    longest_text,
    read_frame,
    unpack,
)

_Templates = dict[str, Template]
_Handler = Callable[[bytes], tuple[bytes, str]]


def main() -> None:
    """Render until the input ends, or until a rendering has spent its memory."""
    _bound_process()
    templates: _Templates = {}
    kind = _answered(partial(_compiled, templates))
    while templates and kind in (READY, TEXT, ERROR, TOO_LONG):
        kind = _answered(partial(_rendered, templates))


def _answered(handle: _Handler) -> bytes | None:
    """Answer the next frame and return the answer's kind; None at the end of the input."""
    _bound_cpu()
    try:
        frame = read_frame(sys.stdin.buffer)
        if frame is None:
            return None
        kind, text = handle(frame)
        reply = answer(kind, text)
    except MemoryError:
        kind, reply = MEMORY_SPENT, answer(MEMORY_SPENT, "")
    except Exception as error:  # a template is a program and can fail in any way
        kind, reply = ERROR, answer(ERROR, str(error))
    sys.stdout.buffer.write(reply)
    sys.stdout.buffer.flush()
    return kind


def _compiled(templates: _Templates, frame: bytes) -> tuple[bytes, str]:
    sandbox = environment(Sandbox)
    sources = unpack(frame)
    compiled = {source: sandbox.from_string(source) for source in dict.fromkeys(sources.values())}
    templates.update({name: compiled[source] for name, source in sources.items()})
    return READY, ""


def _rendered(templates: _Templates, frame: bytes) -> tuple[bytes, str]:
    name, variables = unpack(frame)
    text = templates[name].render(variables)
    return (TOO_LONG, "") if len(text) > longest_text(len(frame)) else (TEXT, text)


def _bound_process() -> None:
    """Keep no inherited descriptors; limit the address space to the current use plus MEMORY.

    Make this the first process that the kernel kills when memory runs out."""
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    used = 0
    with contextlib.suppress(OSError):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, used + MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)


def _bound_cpu() -> None:
    """Limit the CPU time of the next rendering, in case the parent does not end this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + DEADLINE_S) + 2)


def _limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
