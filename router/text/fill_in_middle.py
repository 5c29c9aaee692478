"""Builds fill-in-the-middle prompts from prefix and suffix, with the special tokens of each code model family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.protocol.errors import InvalidRequest
from kvferry.router.text.text_model import TextModel


@dataclass(frozen=True, slots=True)
class _Format:
    """Tokens of one family.

    before, between, last  tokens before the first text, before the second text, and at the end; `last` may be empty
    suffix_first           the suffix is the first text
    ends                   further tokens with which the model ends the filled-in text
    repository, file       tokens before a repository's name and before each file's name; empty: the family has none
    """

    before: str
    between: str
    last: str
    suffix_first: bool = False
    ends: tuple[str, ...] = ()
    repository: str = ""
    file: str = ""


_FORMATS = (
    _Format(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|file_separator|>"), repository="<|repo_name|>", file="<|file_sep|>",
    ),
    _Format(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<|endoftext|>", "<|end_of_text|>", "<fim_pad>"),
        repository="<repo_name>", file="<file_sep>",
    ),
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>", "<fim-pad>")),
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Format("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>", suffix_first=True),
    _Format("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    _Format("[SUFFIX]", "[PREFIX]", "", suffix_first=True),
)  # fmt: skip
"""Formats of Qwen-Coder and CodeGemma, StarCoder and Granite, SantaCoder, DeepSeek-Coder, Seed-Coder, CodeGeeX,
CodeLlama, and Codestral, in this order."""
_REPOSITORY, _FILE = "myproject", "filename"
"""Names of the repository and of the file to fill in, which clients do not send; llama.cpp uses the same."""


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """Fill-in-the-middle tokens of one model. ends: ids of tokens that end the filled-in text."""

    _format: _Format
    _tokens: frozenset[str]
    ends: tuple[int, ...]

    def prompt(self, prefix: str, suffix: str, files: Sequence[tuple[str, str]] = ()) -> str:
        """Return the prompt; the output belongs between prefix and suffix. files: names and texts of other files."""
        form = self._format
        first, second = (suffix, prefix) if form.suffix_first else (prefix, suffix)
        return f"{self._context(files)}{form.before}{first}{form.between}{second}{form.last}"

    def _context(self, files: Sequence[tuple[str, str]]) -> str:
        if not files:
            return ""
        repository, file = self._format.repository, self._format.file
        if file not in self._tokens:
            return "".join(f"{text}\n\n" for _, text in files)
        head = f"{repository}{_REPOSITORY}\n" if repository in self._tokens else ""
        return head + "".join(f"{file}{name}\n{text}" for name, text in files) + f"{file}{_FILE}\n"


def infill_marks(text: TextModel, field: str) -> InfillMarks:
    """Return the model's fill-in-the-middle tokens; raise InvalidRequest, naming the field, if it has none."""
    for form in _FORMATS:
        if all(_is_token(text, each) for each in (form.before, form.between, form.last) if each):
            tokens = {each for each in (form.repository, form.file, *form.ends) if each and _is_token(text, each)}
            own = (form.before, form.between, form.last, form.repository, form.file, *form.ends)
            ids = {text.tokenizer.library.token_to_id(each) for each in own if each}
            return InfillMarks(form, frozenset(tokens), tuple(sorted(each for each in ids if each is not None)))
    raise InvalidRequest(
        f"{field} needs a model with fill-in-the-middle tokens, which the vocabulary of {text.name!r} lacks",
        param=field,
    )


def _is_token(text: TextModel, spelling: str) -> bool:
    """Return whether the tokenizer reads this text as one token."""
    found = text.tokenizer.library.token_to_id(spelling)
    return found is not None and text.encode(spelling, add_special_tokens=False) == [found]
