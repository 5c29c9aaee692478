"""The build stage of a Dockerfile, run here: its own commands, in a folder that stands for the image's root.

What it cannot show without a Docker engine is the base image and what apt-get brings: Python, pip, a compiler and strip
are this machine's."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.deploy.binaries import ROOT
from tests.deploy.dockerfile import Instruction, reaches_build, read_dockerfile

PLACES = ("/opt/", "/docker/", "/wheels", "/src")
"""Paths of the image that its build writes."""


class ImageBuild:
    """One build of an image under `root`, with these arguments in place of the defaults."""

    def __init__(self, name: str, root: Path, **arguments: str) -> None:
        self.root = root
        self._given = arguments
        self.steps = read_dockerfile(ROOT / "deploy" / "docker" / name).stages[0].instructions
        self._folder = root
        self.env = {**os.environ, "PATH": f"{self._programs()}:{os.environ['PATH']}"}

    @property
    def environment(self) -> Path:
        """What travels into the image."""
        return self.root / "opt" / "kvferry"

    def run(self) -> None:
        """All steps. Raises CalledProcessError with the output of the one that failed."""
        for step in self.steps:
            self.take(step)

    def take(self, step: Instruction) -> None:
        if step.name == "ARG":
            name, _, default = step.text.partition("=")
            self.env[name] = self._given.get(name, default.strip('"'))
        elif step.name == "ENV":
            self.env.update(word.split("=", 1) for word in step.words)
        elif step.name == "WORKDIR":
            self._folder = self._here(step.text)
            self._folder.mkdir(parents=True, exist_ok=True)
        elif step.name == "COPY":
            self._copy(*step.words)
        elif step.name == "RUN" and "install-debian" not in step.text:
            self.shell(step.text)

    def shell(self, text: str) -> str:
        """The output of a command of the Dockerfile."""
        command = re.sub(rf"(?<![\w/])({'|'.join(map(re.escape, PLACES))})", rf"{self.root}\1", text)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self._folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, text, done.stdout)
        return done.stdout

    def _programs(self) -> Path:
        """`python` and `pip` as the base image has them."""
        folder = self.root / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        for name, words in (("python", ""), ("pip", " -m pip")):
            (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
            (folder / name).chmod(0o755)
        return folder

    def _copy(self, source: str, target: str) -> None:
        """Files of the checkout, as .dockerignore lets them through."""
        rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
        for path in tracked.stdout.splitlines():
            below = path if source == "." else path.removeprefix(f"{source}/")
            if reaches_build(path, rules) and (source == "." or below != path):
                copy = self._here(target) / below
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, copy, follow_symlinks=False)

    def _here(self, path: str) -> Path:
        return self.root / path.lstrip("/") if path.startswith("/") else self._folder / path
