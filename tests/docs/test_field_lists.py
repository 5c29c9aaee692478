"""The check of field lists finds names that a class or function does not have."""

from __future__ import annotations

import ast

import pytest

from docs.field_lists import unknown_names

CODE = """
class Base:
    name: str

class Lease(Base):
    '''Lease of a node. name: its own. epoch, role: of its start; empty: none.

    Memory
    use: "none": it is small.

    load  {columns}'''

    role: str
    load: int

    def __init__(self, epoch: int) -> None:
        self._held = epoch

def renew(lease, *, within_s):
    '''Renew a lease. {parameter}: of the call.'''
"""


def findings(columns: str = "seconds", parameter: str = "within_s") -> list[str]:
    tree = ast.parse(CODE.format(columns=columns, parameter=parameter))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return list(unknown_names(tree, classes))


def test_fields_of_bases_parameters_and_values_pass() -> None:
    assert findings() == []
    assert findings(parameter="lease, `within_s`") == []


@pytest.mark.parametrize(
    ("columns", "parameter", "finding"),
    [
        ("tokens\n    room  blocks", "lease", "5: Lease describes room, which it does not have"),
        ("tokens. rate: per second", "lease", "5: Lease describes rate, which it does not have"),
        ("tokens", "lease, limit_s", "19: renew describes limit_s, which it does not have"),
    ],
)
def test_names_that_do_not_exist_are_found(columns: str, parameter: str, finding: str) -> None:
    assert findings(columns, parameter) == [finding]
