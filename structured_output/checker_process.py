"""Child process of the grammar checker: compiles clients' grammars on trial and reports errors as JSON lines.

Its parent (structured_output/checker.py) writes one JSON value a line: first the vocabulary, then [number, grammar].
The child answers [number, null or the error] in any order. It exits at the end of its input.
"""

from __future__ import annotations

import json
import sys
import threading

from kvferry.protocol.errors import KvferryError, reason
from kvferry.protocol.work import Grammar
from kvferry.structured_output.compile_threads import CompileThreads
from kvferry.structured_output.llguidance_backend import LlguidanceBackend
from kvferry.structured_output.trial_compile import check
from kvferry.structured_output.vocabulary import Vocabulary

THREADS, SLOW = 1, 6
SHARE = 0.1
"""Share of a core for trials at normal priority. Beyond it, a flood of grammars is compiled at low priority."""
LONGEST_SAID = 1000
"""Maximum length of an error message, in characters: it may quote the grammar, and the parent bounds its lines."""
MEMORY = 6 * 2**30
"""Limit of the address space, in bytes. Most of it is reserved for threads and never used."""


def main() -> None:
    """Validate grammars until the input ends."""
    _bound_memory()
    fields = json.loads(sys.stdin.readline())
    vocabulary = Vocabulary(
        fields["tokenizer"], fields["vocab_size"], tuple(fields["eos_token_ids"]), tuple(fields["specials"])
    )
    try:
        library = LlguidanceBackend(vocabulary)
    except KvferryError as error:
        _say(-1, error.message)
        return
    _say(-1, None)
    pool = CompileThreads("grammar-trial", THREADS, slow=SLOW, share=SHARE)
    for line in sys.stdin:
        number, grammar = json.loads(line)
        pool.submit(_Trial(number, Grammar(*grammar), library, vocabulary))


class _Trial:
    def __init__(self, number: int, grammar: Grammar, library: LlguidanceBackend, vocabulary: Vocabulary) -> None:
        self._number, self._grammar, self._library, self._vocabulary = number, grammar, library, vocabulary

    def __call__(self) -> None:
        wrong: str | None = None
        try:
            check(self._grammar, self._library, self._vocabulary.vocab_size, self._vocabulary.eos_token_ids)
        except KvferryError as error:
            wrong = error.message
        except BaseException as error:  # a panic of the Rust library is not an Exception
            wrong = f"the grammar cannot be used: {reason(error)}"
        _say(self._number, wrong)


_saying = threading.Lock()


def _say(number: int, wrong: str | None) -> None:
    with _saying:
        sys.stdout.write(json.dumps([number, wrong and wrong[:LONGEST_SAID]]) + "\n")
        sys.stdout.flush()


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main()
