"""Between transcript and shape: calls of tools and reasoning are taken out of the text as it comes.

A family is a model's way to write calls, one file each; `families` finds it by name or by the chat template.
"""
