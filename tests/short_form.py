"""Short form of long matrices of tests: each test and each value of its parameters, in few combinations.

`tests/all.sh` asks for it with KVFERRY_TEST_SHORT=1. Without that every combination runs: `make test-matrix` runs all
of them, and a file or a test that is named runs whole."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence, Set

import pytest

SHORT = "KVFERRY_TEST_SHORT"
"""Environment variable: 1 asks for the short form."""
LOGITS = "test_logits_equal_transformers"
"""Name of the tests that compare each family with transformers."""
MATRICES: Mapping[str, tuple[str, ...]] = {
    "test_adapters.py": (),
    "test_cpu_recurrent.py": (),
    "test_cpu_step.py": (),
    "test_derived_grammars.py": ("test_what_the_template_writes_is_accepted",),
    "test_hf_packed.py": (),
    "test_models_cpu.py": (),
    "test_models_dense_families.py": (LOGITS,),
    "test_models_gguf.py": (),
    "test_models_hybrid.py": (LOGITS,),
    "test_models_quantised.py": (),
    "test_models_shaped.py": (),
    "test_ranks_adapters.py": (),
    "test_ranks_experts.py": (),
    "test_window_pages.py": (),
    "triton_cache_cases.py": (),
    "triton_cases.py": (),
    "triton_compile.py": (),
    "triton_compile_amd.py": (),
    "triton_compile_attention.py": (),
    "triton_compile_recurrent.py": (),
    "triton_draw_cases.py": (),
    "triton_latent_cases.py": (),
    "triton_model_cases.py": (),
    "triton_product_cases.py": (),
    "triton_recurrent_cases.py": (),
    "triton_shaped_cases.py": (),
}
"""Names of the files whose combinations take long, each with the names of its tests that run whole all the same."""


def is_short() -> bool:
    """Return whether this run asks for the short form."""
    return os.environ.get(SHORT) == "1"


def covering(cases: Sequence[Set[Hashable]]) -> list[int]:
    """Return the positions of cases, in order, that together have each value that any of them has.

    Each step takes the case with the most values that are still missing, the first one of several."""
    missing: set[Hashable] = set().union(*cases)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda position: (len(missing & cases[position]), -position))
        missing -= cases[best]
        chosen.append(best)
    return sorted(chosen)


def shorten(items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove from these tests what the short form leaves out; return what was removed."""
    if not is_short():
        return []
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _name(item) not in MATRICES.get(item.path.name, (_name(item),)):
            matrices[item.path.name].append(item)
    left_out: set[pytest.Item] = set()
    for same in matrices.values():
        left_out |= {*same} - {same[position] for position in covering([_values(item) for item in same])}
    kept = [item for item in items if item not in left_out]
    items[:] = kept
    return list(left_out)


def _name(item: pytest.Item) -> str:
    """Return the name of the test without its parameters."""
    return item.name.partition("[")[0]


def _values(item: pytest.Item) -> set[Hashable]:
    """Return the test's name and its parameters, each with its value or, where that has no hash, its identity."""
    found: set[Hashable] = {_name(item)}
    for name, value in item.callspec.params.items() if hasattr(item, "callspec") else ():
        try:
            found.add((name, value))
        except TypeError:
            found.add((name, id(value)))
    return found
