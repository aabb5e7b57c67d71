from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NO_PRICE_LIMIT = 1_000_000.0
"""`price_upper` without a limit."""
PRICE_STEPS = tuple(10.0 * i for i in range(1, 100))
"""Price limits, dollars."""


@dataclass(frozen=True, slots=True)
class Product:
    asin: str
    title: str
    query: str
    """Search query, its category."""
    product_category: str
    """Categories, separated by `›`."""
    price: float
    """Dollars."""
    price_tag: str
    attributes: tuple[str, ...] = ()
    bullet_points: tuple[str, ...] = ()
    description: str = ""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Option -> values, lower case."""
    rating: str = "N.A."
    reviews: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Goal:
    instruction: str
    product: Product
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    """Values to choose."""
    price_upper: float


@dataclass(frozen=True, slots=True)
class Catalogue:
    """`goals[:num_held_out]` are for evaluation, `goals[first_train:]` for training."""

    products: Sequence[Product]
    goals: Sequence[Goal]
    num_held_out: int
    first_train: int

    def split(self, name: str) -> Sequence[Goal]:
        match name:
            case "held_out":
                return self.goals[: self.num_held_out]
            case "train":
                return self.goals[self.first_train :]
            case _:
                return self.goals


def price_limits(price: float) -> tuple[float, ...]:
    """Return the next four limits above a price."""
    return tuple(step for step in PRICE_STEPS if step > price)[:4]
