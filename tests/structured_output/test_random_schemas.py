"""The demo model at temperature 1 under random strict schemas: whatever was not cut at max_tokens parses and validates.

`make test-schemas` runs a thousand; otherwise some dozens do.
"""

from __future__ import annotations

import json
import os

import jsonschema
import pytest

from tests.random_schemas import random_schemas
from tests.schema_runs import SchemaRuns

COUNT = int(os.environ.get("KVFERRY_TEST_SCHEMAS", "32"))
CUT_SHARE = 0.05
"""Some need more tokens than there are, even when they are closed in time."""


@pytest.mark.slow
@pytest.mark.timeout(300 + 7 * COUNT)
def test_outputs_under_random_schemas_parse_and_validate() -> None:
    cut = closed = 0
    for run in SchemaRuns()(random_schemas(COUNT)):
        said = f"schema {run.number}: {json.dumps(run.schema)}\noutput: {run.text!r} ({run.finish}, {run.error})"
        assert run.error is None, said
        try:
            value = json.loads(run.text)
        except ValueError:
            assert run.finish == "length", said
            cut += 1
            continue
        errors = [error.message for error in jsonschema.Draft202012Validator(run.schema).iter_errors(value)]
        assert not errors, f"{said}\n{errors}"
        closed += run.finish == "closed"
    print(f"{COUNT} schemas, {closed} outputs closed before max_tokens, {cut} cut by it")
    assert cut <= max(2, CUT_SHARE * COUNT), f"{cut} of {COUNT} were cut"
