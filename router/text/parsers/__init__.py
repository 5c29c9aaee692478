"""Streaming parsers that extract reasoning and tool calls from output text, and grammars that enforce their syntax.

A family is a model's format of tool calls, with one file each. `families` finds it by name or by the chat template."""
