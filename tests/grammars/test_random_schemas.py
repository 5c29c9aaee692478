"""The demo model at temperature 1 under random strict schemas: whatever was not cut at max_tokens parses and validates.

`make test-schemas` runs a thousand; otherwise some dozens do.
"""

from __future__ import annotations

import json
import os

import jsonschema
import pytest
from random_schemas import random_schema
from schema_runs import SchemaRuns

COUNT = int(os.environ.get("KVFERRY_TEST_SCHEMAS", "32"))
CUT_SHARE = 0.3
"""Free texts and recursion may go on for long at temperature 1."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_outputs_under_random_schemas_parse_and_validate() -> None:
    schemas = [random_schema(number) for number in range(COUNT)]
    cut = 0
    for run in SchemaRuns()(schemas):
        said = f"schema {run.number}: {json.dumps(run.schema)}\noutput: {run.text!r} ({run.finish}, {run.error})"
        assert run.error is None, said
        if run.finish == "length":
            cut += 1
            continue
        assert run.finish == "stop", said
        try:
            value = json.loads(run.text)
        except ValueError as error:
            pytest.fail(f"{said}\n{error}")
        errors = [error.message for error in jsonschema.Draft202012Validator(run.schema).iter_errors(value)]
        assert not errors, f"{said}\n{errors}"
    print(f"{COUNT} schemas, {cut} cut at max_tokens")
    assert cut <= max(2, CUT_SHARE * COUNT), f"{cut} of {COUNT} were cut"
