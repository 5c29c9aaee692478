"""StepCost: seconds of a step as a line in its number of rows, fitted to past steps; used by budget and speculation."""

from __future__ import annotations

ROW = 0.1
"""Assumed cost of another row, as a share of a step of one row, until steps with more rows were seen."""
FORGET, ASSUMED_WEIGHT = 0.98, 2.0
"""Weight of an older step relative to the one after it, and weight of the assumed cost in steps."""
NOISE = 1 / 3
"""Spread of rows, as a share of their mean, below which the assumed cost weighs more than measured steps.

Steps of equal rows differ by about a tenth of their time, and the assumption is wrong by some three tenths."""
NEAR, FADE = 1 / 8, 0.001
"""Deviation from the mean rows, as a share, below which a step shows no row's cost; share of it that then fades."""
OUTLIER, MAX_OUTLIERS = 4.0, 8
"""A step that takes OUTLIER times its predicted time is counted at the prediction, for MAX_OUTLIERS steps.

Something else delayed it. If steps do take as long now, the following ones show it."""

MIN_S = 1e-6
"""Shortest duration of a step, also with a coarse clock."""


class StepCost:
    """Seconds of a step as a linear function of its rows, fitted to past steps with recent ones weighted most."""

    def __init__(self) -> None:
        self._count = self._rows = self._seconds = self._squares = self._products = 0.0
        self._row = ROW

    def observe(self, rows: int, seconds: float) -> None:
        """Record a step of `rows` rows."""
        mean, seconds = self._rows / self._count if self._count else rows, max(MIN_S, seconds)
        if self._count > MAX_OUTLIERS:
            first, further = self.line()
            seconds = min(seconds, OUTLIER * (first + further * (rows - 1)))
        self._count = FORGET * self._count + 1
        self._rows = FORGET * self._rows + rows
        self._seconds = FORGET * self._seconds + seconds
        self._squares = FORGET * self._squares + rows * rows
        self._products = FORGET * self._products + rows * seconds
        if abs(rows - mean) > NEAR * mean:
            first, further = self.line()
            self._row = further / first
        else:
            self._row += FADE * (ROW - self._row)

    @property
    def spread(self) -> float:
        """Return the spread of rows over the counted steps; with little of it a row's cost is unknown."""
        return max(0.0, self._squares - self._rows**2 / self._count) if self._count else 0.0

    @property
    def is_measured(self) -> bool:
        """Return whether steps differ enough that the measured cost of a row is better than the guess."""
        return self.spread > self._assumed_weight

    @property
    def known(self) -> bool:
        """Return whether any step was seen."""
        return self._count > 0

    def line(self) -> tuple[float, float]:
        """Return seconds of a step of one row, and of each further one; (1, ROW) while nothing is known."""
        if not self._count:
            return 1.0, ROW
        rows, seconds = self._rows / self._count, self._seconds / self._count
        assumed = self._row * seconds / (1 + self._row * (rows - 1))
        trust = self._assumed_weight
        slope = (self._products - rows * self._seconds + trust * assumed) / (self.spread + trust)
        slope = min(max(slope, 0.01 * seconds / rows), seconds / rows)
        return seconds - slope * (rows - 1), slope

    @property
    def _assumed_weight(self) -> float:
        return max(ASSUMED_WEIGHT, (NOISE * self._rows / self._count) ** 2) if self._count else ASSUMED_WEIGHT
