"""As much of a Dockerfile's grammar as the checks need."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction with its flags (`--from=build`) apart from the rest of its words."""

    name: str
    flags: dict[str, str]
    text: str

    @property
    def words(self) -> list[str]:
        """Words of the exec form or of the plain one."""
        return list(json.loads(self.text)) if self.text.startswith("[") else shlex.split(self.text)


@dataclass(frozen=True, slots=True)
class Stage:
    image: str
    alias: str
    instructions: tuple[Instruction, ...]

    def last(self, name: str) -> Instruction | None:
        return next((item for item in reversed(self.instructions) if item.name == name), None)


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """Stages in order; the last one is the image."""

    stages: tuple[Stage, ...]

    @property
    def entrypoint(self) -> list[str]:
        found = self.stages[-1].last("ENTRYPOINT")
        return found.words if found else []

    @property
    def command(self) -> list[str]:
        found = self.stages[-1].last("CMD")
        return found.words if found else []

    @property
    def user(self) -> str:
        found = self.stages[-1].last("USER")
        return found.text if found else "root"

    @property
    def environment(self) -> dict[str, str]:
        """What ENV sets in the image, but for PATH, which is the base's as well."""
        found = [item.words for item in self.stages[-1].instructions if item.name == "ENV"]
        pairs = dict(word.split("=", 1) for words in found for word in words)
        return {name: value for name, value in pairs.items() if name != "PATH"}

    def of(self, name: str) -> list[Instruction]:
        return [item for stage in self.stages for item in stage.instructions if item.name == name]


def read_dockerfile(path: Path) -> Dockerfile:
    """Raises ValueError on an instruction before the first FROM other than ARG."""
    stages: list[Stage] = []
    for item in map(_instruction, _logical_lines(path.read_text())):
        if item.name == "FROM":
            words = item.words
            stages.append(Stage(words[0], words[2] if len(words) == 3 else "", ()))
        elif stages:
            stage = stages[-1]
            stages[-1] = Stage(stage.image, stage.alias, (*stage.instructions, item))
        elif item.name != "ARG":
            raise ValueError(f"{item.name} before FROM")
    return Dockerfile(tuple(stages))


def reaches_build(path: str, rules: list[str]) -> bool:
    """Whether a .dockerignore of these lines lets a file into the build: the last line that names it or a folder above
    it decides. `*` and `?` stay within a name, a leading `**/` stands for any folders or none."""
    parts, allowed = path.split("/"), True
    for rule in rules:
        pattern = rule.removeprefix("!").removeprefix("**/").split("/")
        starts = range(len(parts)) if "**/" in rule else (0,)
        if any(_names(pattern, parts[start : start + len(pattern)]) for start in starts):
            allowed = rule.startswith("!")
    return allowed


def _names(pattern: list[str], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(map(fnmatchcase, parts, pattern))


def _logical_lines(text: str) -> list[str]:
    kept = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return "\n".join(kept).replace("\\\n", " ").split("\n")


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().partition(" ")
    flags: dict[str, str] = {}
    while rest.startswith("--"):
        flag, _, rest = rest.partition(" ")
        key, _, value = flag[2:].partition("=")
        flags[key] = value
    return Instruction(name.upper(), flags, rest.strip())
