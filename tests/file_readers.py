"""What routers and workers read of a model's files, and what comes of it: read, refused in plain words, or wrong.

A million mutants differ from the whole model in a few bytes each. `FileReaders` therefore remembers what came of each
part of the reading, and what production's readers made of the same bytes. Without `remember` it reads all of each
mutant; `tests/test_file_readers.py` compares both."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.engine.events import Failed
from kvferry.model_files import source
from kvferry.model_files.memory_needs import model_needs
from kvferry.protocol.errors import ConfigError, InvalidRequest, KvferryError, ModelFailed
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import RouterSettings, WorkerSettings
from kvferry.protocol.work import Generate, Grammar
from kvferry.router.text.grammar_vocabulary import vocabulary_of
from kvferry.router.text.loader import load_text_model
from kvferry.structured_output.llguidance_backend import LlguidanceBackend
from kvferry.structured_output.vocabulary import Vocabulary
from kvferry.worker import grammar_masks
from kvferry.worker.engine_factory import assemble
from tests.file_memory import FileMemory, Remembered
from tests.file_mutants import Mutant
from tests.file_parts import Parts

LONGEST = 1000
"""Characters of a refusal."""
KEPT_OUTCOMES = 100_000
"""Outcomes of one part of the reading that are remembered, by 64-bit hashes of what the part can see."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a mutant. wrong: what must not be, or empty; said: the error it was refused with, or empty.

    again: all of it was remembered, because an earlier mutant was the same or differed where nothing reads."""

    wrong: str = ""
    said: str = ""
    again: bool = False


class FileReaders:
    """Reads mutants. One a process: `remember` replaces functions of production's modules."""

    def __init__(self, *, remember: bool = True) -> None:
        self._memory = FileMemory() if remember else None
        self._library: Callable[[Vocabulary], LlguidanceBackend] = vars(grammar_masks)["LlguidanceBackend"]
        self._mutants = Remembered(KEPT_OUTCOMES)
        reads: tuple[Callable[[Path], None], ...] = (needs, self.text, masks, serve)
        self._parts = {read: Remembered(KEPT_OUTCOMES) for read in reads}
        self._said = Remembered(KEPT_OUTCOMES)
        self._rendered, self._spoken, self._words = Remembered(), Remembered(), Remembered()

    def outcome(self, mutant: Mutant) -> Outcome:
        """Read a mutant as routers do and as workers do. The first thing that is wrong counts, or the first refusal."""
        if self._memory is None:
            return _first([outcome_of(read, mutant.path) for read in self._parts])
        self._memory.begin(mutant)
        key = hash((mutant.path, mutant.changed, mutant.files.get(mutant.changed)))
        again = key in self._mutants
        found: Outcome = self._mutants.get(key, lambda: self._read(mutant))
        return Outcome(found.wrong, found.said, again or found.again)

    def _read(self, mutant: Mutant) -> Outcome:
        keys = Parts.of(mutant)
        found = _first(
            [
                self._part(needs, mutant.path, keys.needs),
                self._part(self.text, mutant.path, keys.text),
                self._part(masks, mutant.path, keys.masks),
                self._part(serve, mutant.path, keys.serve),
            ]
        )
        return self._shared(found)

    def _part(self, read: Callable[[Path], None], path: Path, key: Hashable) -> Outcome:
        kept, short = self._parts[read], hash(key)
        again = short in kept
        found: Outcome = kept.get(short, lambda: self._shared(outcome_of(read, path)))
        return self._shared(Outcome(found.wrong, found.said, again))

    def _shared(self, outcome: Outcome) -> Outcome:
        """The first of all that are equal: most mutants are refused in few words."""
        return self._said.get(outcome, lambda: outcome)  # type: ignore[no-any-return]

    def text(self, path: Path) -> None:
        """All that a router reads of a model, and a prompt."""
        text = load_text_model(RouterSettings(model=(str(path),)))
        self._spoken.get(text.tokenizer, lambda: text.tokenizer.decode(text.encode("Hello 12 wörld, a")))
        if text.template is not None:
            with suppress(InvalidRequest):
                greeting = [{"role": "user", "content": "hello"}]
                self._rendered.get((text.template, text.name), lambda: text.render(greeting))
        with suppress(ConfigError):  # such a model is served without grammars
            words = self._words.get((text.tokenizer, repr(text.facts)), lambda: vocabulary_of(text))
            self._library(words).compile(Grammar("json_object", ""))


def needs(path: Path) -> None:
    """What `kvferry doctor` computes of a model."""
    model_needs(source.resolve(str(path)))


def masks(path: Path) -> None:
    """What a worker makes of the tokenizer, also of a model that its router would refuse."""
    found = source.resolve(str(path), weights=False)
    grammar_masks.make_masks(found, source.read_facts(found).vocab_size)


def serve(path: Path) -> None:
    """All that a worker reads of a model, and a few tokens of it."""
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


def outcome_of(read: Callable[[Path], None], path: Path) -> Outcome:
    """What comes of reading the files at `path`, whose name a refusal must say."""
    try:
        read(path)
    except ModelFailed as error:  # weights that compute no number
        return Outcome("", error.message)
    except KvferryError as error:
        said = error.message
        if path.stem not in said:
            return Outcome(f"it does not name the model: {said}", said)
        plain = "\n" not in said and " object at 0x" not in said and len(said) <= LONGEST
        return Outcome("" if plain else f"it is no line of plain words: {said!r:.2000}", said)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return Outcome(f"no typed error: {error!r}\n{traceback.format_exc()[-2500:]}")
    return Outcome()


def _first(found: list[Outcome]) -> Outcome:
    wrong = next((each.wrong for each in found if each.wrong), "")
    said = next((each.said for each in found if each.said), "")
    return Outcome(wrong, said, all(each.again for each in found))
