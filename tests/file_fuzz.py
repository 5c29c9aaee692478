"""Reads mutants of a model's files as routers and workers do, in a process with bounds on memory and time.

    python tests/file_fuzz.py HOME FIRST LAST

writes a line of JSON for each mutant before it reads it, and one for what came of it. `fuzzed` runs as many of those
processes as it takes, and tells what must not be: a process that died, hung or took too much, an error without a type,
and one that does not say which model it is about.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 30.0
"""For one mutant, on a machine however busy; a whole model takes 0.1 s."""
MEMORY = 3 * 2**30
"""Bytes of address space beyond what the process has once all is imported."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a mutant. wrong: what must not be, or empty; said: the error it was refused with."""

    seed: int
    done: str
    wrong: str = ""
    said: str = ""


def fuzzed(home: Path, first: int, last: int) -> Iterator[Found]:
    """Mutants first … last - 1."""
    while first < last:
        command = [sys.executable, str(HERE / "file_fuzz.py"), str(home / str(first)), str(first), str(last)]
        env = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (home / f"{first}.err").open("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
            assert process.stdout is not None
            begun = None
            for line in process.stdout:
                told = json.loads(line)
                if "wrong" not in told:
                    begun = Found(**told)
                    continue
                begun = None
                yield Found(**told)
                first = told["seed"] + 1
            status = process.wait()
            errors.seek(0)
            tail = errors.read()[-3000:]
        if begun is not None:
            yield Found(begun.seed, begun.done, f"the process ended with {status}:\n{tail}")
            first = begun.seed + 1
        elif status:
            raise RuntimeError(f"the fuzzing process ended with {status}:\n{tail}")


def main(home: Path, first: int, last: int) -> None:
    import torch

    from tests.file_mutants import Mutants

    torch.set_num_threads(1)
    mutants = Mutants(home)
    for path in (mutants.directory, *mutants.files):
        read(path)
    _bound_memory()
    for seed in range(first, last):
        path, done = mutants.write(seed)
        _say(seed=seed, done=done)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        wrong, said = _outcome(path)
        faulthandler.cancel_dump_traceback_later()
        _say(seed=seed, done=done, wrong=wrong, said=said)


def read(path: Path) -> None:
    """All that a router and a worker read of a model, and a few tokens of it. Raises what they raise."""
    from kvferry.engine.events import Failed
    from kvferry.model_files.memory_needs import model_needs
    from kvferry.model_files.source import resolve
    from kvferry.protocol.errors import ConfigError, InvalidRequest
    from kvferry.protocol.messages import Job
    from kvferry.protocol.sampling import SamplingParams
    from kvferry.protocol.settings import RouterSettings, WorkerSettings
    from kvferry.protocol.work import Generate, Grammar
    from kvferry.router.text.grammar_vocabulary import vocabulary_of
    from kvferry.router.text.load import load_text_model
    from kvferry.structured_output.llguidance_backend import LlguidanceBackend
    from kvferry.worker.engine_factory import assemble

    model_needs(resolve(str(path)))
    text = load_text_model(RouterSettings(model=(str(path),)))
    ids = text.encode("Hello 12 wörld, a")
    text.tokenizer.decode(ids)
    if text.template is not None:
        with suppress(InvalidRequest):
            text.render([{"role": "user", "content": "hello"}])
    with suppress(ConfigError):  # such a model is served without grammars
        LlguidanceBackend(vocabulary_of(text)).compile(Grammar("json_object", ""))
    settings = WorkerSettings(role="decode", model=str(path), kv_blocks=16, threads=1, model_impl="kvferry")
    engine = assemble(settings).engine
    prompt = tuple(range(min(20, engine.longest - 1)))
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=None)
    engine.add(Job("r", 0, prompt, len(prompt), Generate(params), "t"))
    while engine.has_work():
        engine.step()
    for event in engine.events:
        if isinstance(event, Failed):
            raise event.error


def _outcome(path: Path) -> tuple[str, str]:
    """What is wrong, and the error's text."""
    from kvferry.protocol.errors import KvferryError, ModelFailed

    try:
        read(path)
    except ModelFailed as error:  # weights that compute no number
        return "", error.message
    except KvferryError as error:
        named = path.stem in error.message
        return ("" if named else f"it does not name the model: {error.message}"), error.message
    except Exception as error:
        import traceback

        return f"no typed error: {error!r}\n{traceback.format_exc()[-2500:]}", ""
    return "", ""


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


def _bound_memory() -> None:
    import resource

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
