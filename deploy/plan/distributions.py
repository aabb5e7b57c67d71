"""Distributions of times and counts: `0.2`, `normal:0.2:0.1`, `lognormal:2:5`, `uniform:3:12`."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Shape = Literal["constant", "normal", "lognormal", "exponential", "uniform"]
NUM_PARAMETERS: dict[str, int] = {"constant": 1, "normal": 2, "lognormal": 2, "exponential": 1, "uniform": 2}


@dataclass(frozen=True, slots=True)
class ValueDistribution:
    """`normal` is truncated at 0; `lognormal` has the mean and deviation of the value itself."""

    shape: Shape
    first: float
    """Mean; least value of `uniform`."""
    second: float = 0.0
    """Standard deviation; greatest value of `uniform`."""

    @classmethod
    def parse(cls, text: str) -> "ValueDistribution":
        """Parse a distribution; raises ValueError."""
        name, *numbers = text.split(":") if ":" in text else ("constant", text)
        if name not in NUM_PARAMETERS:
            raise ValueError(f"{text!r}: {name!r} is none of {', '.join(NUM_PARAMETERS)}")
        if len(numbers) != NUM_PARAMETERS[name]:
            raise ValueError(f"{text!r}: {name} takes {NUM_PARAMETERS[name]} number(s)")
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            raise ValueError(f"{text!r} must be a number, or NAME:NUMBER[:NUMBER] like lognormal:0.2:0.2") from None
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"{text!r}: numbers must be finite and not negative")
        if name == "uniform" and values[1] < values[0]:
            raise ValueError(f"{text!r}: the second number of uniform is the greatest value")
        return cls(name, *values)  # pyright: ignore[reportArgumentType]

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
        match self.shape:
            case "normal":
                return np.maximum(rng.normal(self.first, self.second, count), 0.0)
            case "lognormal" if self.first > 0:
                variance = math.log1p((self.second / self.first) ** 2)
                return rng.lognormal(math.log(self.first) - variance / 2, math.sqrt(variance), count)
            case "exponential":
                return rng.exponential(self.first, count)
            case "uniform":
                return rng.uniform(self.first, self.second, count)
            case _:
                return np.full(count, self.first)

    def draw_counts(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Return whole numbers from 1; `uniform` includes both ends."""
        if self.shape == "uniform":
            return rng.integers(max(round(self.first), 1), max(round(self.second), 1) + 1, count)
        return np.maximum(np.rint(self.draw(rng, count)), 1).astype(np.int64)
