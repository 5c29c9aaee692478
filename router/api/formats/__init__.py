"""Answer formats of generations: chat and completions, and the ordered parts that answers of other APIs consist of."""
