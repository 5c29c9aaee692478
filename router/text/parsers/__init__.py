"""Streaming parsers that extract reasoning and tool calls from output text.

A family is a model's way to write calls, one file each; `families` finds it by name or by the chat template.
"""
