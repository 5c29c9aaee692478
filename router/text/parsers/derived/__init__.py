"""Derives a model's own syntax of tool calls and reasoning from what its chat template writes.

`probes` are rendered, `derivation` compares the texts and describes the syntax (`syntax`), `verification` reads the
template's own calls back. `reader` and `grammar` follow from the description."""
