"""WebShop's own shop, from its published files.

Goal order (`random.seed(233)`) and splits (first 500 for testing, from 1,500 for training) are the original's; price
ranges and limits are seeded.
"""

import itertools
import random
import re
from collections.abc import Iterator, Mapping

from offbeat.envs.webshop.catalogue import (
    NO_PRICE_LIMIT,
    Catalogue,
    Goal,
    Product,
    price_limits,
)
from offbeat.envs.webshop.files import (
    HumanGoal,
    Item,
    ItemAttributes,
    ItemReviews,
    ShopFiles,
    read_items,
    read_reviews,
    read_table,
)

SHUFFLE_SEED = 233
NUM_TEST, FIRST_TRAIN = 500, 1_500
DEFAULT_PRICE = 100.0
MAX_ASIN_CHARS = 10
NO_ATTRIBUTES = ("DUMMY_ATTR",)


def load_catalogue(files: ShopFiles, num_products: int | None, *, human_goals: bool) -> Catalogue:
    """Load a shop; raises ValueError if a file is missing or malformed."""
    items_path, attributes_path = files.find("items"), files.find("attributes")
    goals_path = files.find("human_goals") if human_goals else None
    items: dict[str, Item] = {}
    for item in read_items(items_path, num_products):
        if item.asin != "nan" and len(item.asin) <= MAX_ASIN_CHARS:
            items.setdefault(item.asin, item)
    attributes = read_table(attributes_path, ItemAttributes, items)
    reviews_path = files.folder / "reviews.json"
    reviews = read_reviews(reviews_path) if reviews_path.is_file() else {}
    draws = random.Random(SHUFFLE_SEED)
    products = [
        _make_product(item, attributes.get(item.asin), reviews.get(item.asin), draws) for item in items.values()
    ]
    unpriced_goals = (
        _synthetic_goals(products, attributes)
        if goals_path is None
        else _human_goals(products, read_table(goals_path, list[HumanGoal], items))
    )
    goals = [_with_price(goal, draws) for goal in unpriced_goals]
    random.Random(SHUFFLE_SEED).shuffle(goals)
    if not goals:
        source = attributes_path if goals_path is None else goals_path
        raise ValueError(
            f"{source} has no goals for the first {len(products)} products of {items_path}: raise num_products"
        )
    small = len(goals) <= FIRST_TRAIN
    eighth = max(1, len(goals) // 8)
    return Catalogue(products, goals, eighth if small else NUM_TEST, eighth if small else FIRST_TRAIN)


def _make_product(
    item: Item, known: ItemAttributes | None, reviews: ItemReviews | None, draws: random.Random
) -> Product:
    prices = _prices(item)
    return Product(
        asin=item.asin,
        title=item.name,
        query=item.query.lower().strip(),
        product_category=item.product_category,
        price=prices[0] if len(prices) == 1 else draws.uniform(prices[0], prices[1]),
        price_tag=" to ".join(f"${price}" for price in prices),
        attributes=NO_ATTRIBUTES if known is None or known.attributes is None else tuple(known.attributes),
        bullet_points=_texts(item.small_description),
        description=item.full_description or "",
        options=_options(item),
        rating=str(reviews.average_rating if reviews else "N.A."),
        reviews=tuple(row.review for row in reviews.reviews) if reviews else (),
    )


def _prices(item: Item) -> list[float]:
    try:
        prices = [float(re.sub(r"[^\d.]", "", part)) for part in (item.pricing or "").split("$")[1:]]
    except ValueError:
        raise ValueError(f"product {item.asin}: expected a pricing like `$10.99`, got {item.pricing!r}") from None
    return prices[:2] or [DEFAULT_PRICE]


def _texts(value: list[object] | str | None) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else (value or "",)


def _options(item: Item) -> dict[str, tuple[str, ...]]:
    if not isinstance(item.customization_options, dict):
        return {}
    return {
        name.lower(): tuple(option.value.strip().replace("/", " | ").lower() for option in options)
        for name, options in item.customization_options.items()
        if options is not None
    }


def _human_goals(products: list[Product], goals: Mapping[str, list[HumanGoal]]) -> Iterator[Goal]:
    for product in products:
        for goal in goals.get(product.asin, ()):
            if goal.instruction_attributes:
                named = goal.instruction_options
                options = tuple(named.values() if isinstance(named, dict) else named)
                text = goal.instruction.strip(".")
                yield Goal(text, product, tuple(goal.instruction_attributes), options, NO_PRICE_LIMIT)


def _synthetic_goals(products: list[Product], attributes: Mapping[str, ItemAttributes]) -> Iterator[Goal]:
    for product in products:
        row = attributes.get(product.asin)
        if row is None or not row.instruction or not row.instruction_attributes:
            continue
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            chosen = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            instruction = f"{row.instruction} with {chosen}" if chosen else row.instruction
            yield Goal(instruction, product, tuple(row.instruction_attributes), values, NO_PRICE_LIMIT)


def _with_price(goal: Goal, draws: random.Random) -> Goal:
    limits = price_limits(goal.product.price)
    if len(limits) < 2:
        return goal
    limit = max(draws.sample(limits, 2))
    text = f"{goal.instruction}, and price lower than {limit:.2f} dollars"
    return Goal(text, goal.product, goal.attributes, goal.options, limit)
