"""Answer formats of chat and completions: chunks, whole bodies and log-probabilities; Parts of other APIs' answers."""
