"""Variables of templates that take functions as JSON text, and the date, in place of tools (firefunction)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvferry.model_files.template_language import strftime_now

FUNCTIONS, DATE = "functions", "datetime"
"""Names of the variables."""


def takes_functions(variables: Collection[str]) -> bool:
    """Return whether a template that reads these variables takes functions in place of tools."""
    return {FUNCTIONS, DATE} <= set(variables) and "tools" not in variables


def function_variables(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the variables; the day alone is told, so that one day's prompts have one beginning."""
    functions = [each.get("function", each) for each in tools]
    return {FUNCTIONS: json.dumps(functions, indent=4, ensure_ascii=False), DATE: strftime_now("%Y-%m-%d")}
