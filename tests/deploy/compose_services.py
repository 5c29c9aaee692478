"""The services of a compose file as processes of this machine, with exactly their commands and environments.

    python -m tests.deploy.compose_services DESCRIPTION

Run inside a host of its own (compose_host.sh). DESCRIPTION is a file of JSON: `programs`, the words that stand for
`kvferry` in each service; `valkey`, the server's path; `services`, as docker compose gives them; `images`, the
variables of each service's image. Asks the router for a completion, prints its text and its route, and ends all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

READY_S = 240
END_S = 30
Service = dict[str, Any]


def main() -> None:
    described = json.loads(Path(sys.argv[1]).read_text())
    services = dict(
        sorted(described["services"].items(), key=lambda item: item[0] != "redis")
    )  # from another host, too
    started = set[str]()
    with ExitStack() as stack:
        while len(started) < len(services):
            name = next(n for n in services if n not in started and started >= set(services[n].get("depends_on") or ()))
            service = services[name]
            environment = {**described["images"].get(name, {}), **(service.get("environment") or {})}
            words = service["command"]
            program = [described["valkey"]] if name == "redis" else described["programs"][name]
            argv = [*program, *(words[1:] if name == "redis" else words)]
            process = stack.enter_context(running(argv, environment))
            if name == "redis":
                time.sleep(1)
            else:
                wait_until_healthy(name, process, service, program, environment)
            started.add(name)
        print(json.dumps(ask()))


@contextmanager
def running(argv: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Ended as docker stop does: SIGTERM, and SIGKILL where that does not end it."""
    inherited = {name: os.environ[name] for name in ("PATH", "OMP_WAIT_POLICY") if name in os.environ}
    process = subprocess.Popen(argv, env={**inherited, **environment}, stdout=sys.stderr)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        finally:
            process.kill()
            process.wait()


def wait_until_healthy(
    name: str, process: subprocess.Popen[bytes], service: Service, program: list[str], environment: dict[str, str]
) -> None:
    """Asks what the service's own health check asks. In a container the process is number 1; here it is named."""
    kind, command, *words = service["healthcheck"]["test"]
    assert (kind, command) == ("CMD", "kvferry"), service["healthcheck"]
    asked = [*program, *words, "--pid", str(process.pid)]
    until = time.monotonic() + READY_S
    while (
        done := subprocess.run(asked, env={"PATH": os.environ["PATH"], **environment}, capture_output=True)
    ).returncode:
        if process.poll() is not None or time.monotonic() > until:
            sys.exit(f"{name} does not get ready (status {process.poll()}): {done.stderr.decode()}")
        time.sleep(0.3)


def ask() -> dict[str, Any]:
    body = json.dumps({"model": "SmolLM2-135M-Instruct", "prompt": "The sea is", "max_tokens": 3, "temperature": 0})
    for_json = {"content-type": "application/json"}
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body.encode(), for_json)
    with urllib.request.urlopen(request, timeout=60) as answer:
        route = answer.headers["x-kvferry-route"]
        return {"text": json.load(answer)["choices"][0]["text"], "route": route}


if __name__ == "__main__":
    main()
