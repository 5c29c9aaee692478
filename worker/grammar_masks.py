"""Construction of a node's grammar masks (structured output) from the tokenizer's vocabulary, with their threads."""

from __future__ import annotations

import logging
import time

from kvferry.engine.grammar_masks import GrammarMasks
from kvferry.model_files.source import ModelSource, read_facts
from kvferry.model_files.tokenizer import load_tokenizer
from kvferry.protocol.errors import ConfigError
from kvferry.runtime.limits import available_cores
from kvferry.structured_output.compile_threads import CompileThreads
from kvferry.structured_output.llguidance_backend import LlguidanceBackend
from kvferry.structured_output.vocabulary import Vocabulary

log = logging.getLogger("kvferry.worker")

CORES_PER_THREAD = 8
"""CPU cores per mask thread.

These threads compute the masks that would delay the engine thread: first masks, slow masks, and searches for a way to
complete the output."""


def read_vocabulary(source: ModelSource, vocab_size: int) -> Vocabulary:
    """Return the vocabulary of a model's tokenizer, for logits of that width. Raises ConfigError."""
    tokenizer, facts = load_tokenizer(source), read_facts(source)
    size = max(vocab_size, tokenizer.vocab_size)
    return Vocabulary(tokenizer.library.to_str(), size, facts.eos_token_ids, tokenizer.special_texts)


def make_masks(source: ModelSource, vocab_size: int) -> GrammarMasks:
    """Return grammar masks; for an unreadable tokenizer, masks that refuse every grammar and say why.

    Reading the tokenizer takes about a second with the GIL held. It is therefore done at start, not at the first
    grammar."""
    began = time.monotonic()
    try:
        vocabulary = read_vocabulary(source, vocab_size)
        library = LlguidanceBackend(vocabulary)
    except ConfigError as error:
        log.info("grammars are not available: %s", error.message)
        return GrammarMasks.none(f"this node cannot use the tokenizer of {source.name} for grammars: {error.message}")
    log.info("the tokenizer was prepared for grammars in %.1f s", time.monotonic() - began)
    threads = max(1, available_cores() // CORES_PER_THREAD)
    return GrammarMasks(
        library,
        vocabulary.vocab_size,
        CompileThreads("grammar-compile", bound=1024),
        CompileThreads("grammar-mask", threads),
    )
