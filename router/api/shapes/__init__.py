"""Answer formats of generations, shared by chat and completions."""
