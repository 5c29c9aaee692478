"""What /openapi.json says is what the router does: schemathesis sends what fits the description and what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api_parts import Api, FakeCluster, says, served
from tests.short_form import is_short

EXAMPLES = int(os.environ.get("KVFERRY_TEST_EXAMPLES", "3"))
"""Of each route; more, and those that cover each keyword of its schema, in `make fuzz-api`."""
SEED = os.environ.get("KVFERRY_TEST_SEED", "1")
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "unsupported_method",
)  # fmt: skip


PHASES = "examples,fuzzing" if is_short() else "examples,coverage,fuzzing"
"""What covers each keyword takes a minute: it is left to the long form."""
LIMIT_S = 300 + 30 * EXAMPLES
"""Of each test, in seconds."""


def run(url: str, folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", f"--seed={SEED}", "--no-color"]
    command += ["--workers=2", "--request-timeout=30", f"--phases={PHASES}", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S - 30)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]


@pytest.mark.timeout(LIMIT_S)
def test_no_route_breaks_its_description(tmp_path: Path) -> None:
    with served(Api(FakeCluster(says("Yes.")), data_dir=str(tmp_path)).app) as url:
        run(url, tmp_path, f"--checks={','.join(CHECKS)}", f"--max-examples={EXAMPLES}")


@pytest.mark.timeout(LIMIT_S)
def test_a_key_is_asked_for_where_it_is_described(tmp_path: Path) -> None:
    with served(Api(FakeCluster(says("Yes.")), data_dir=str(tmp_path), api_key="secret").app) as url:
        checks = "--checks=ignored_auth,status_code_conformance"
        run(url, tmp_path, checks, "--max-examples=1", "--phases=fuzzing", "--header=Authorization: Bearer secret")
