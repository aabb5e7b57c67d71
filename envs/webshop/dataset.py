"""WebShop's data: `items_shuffle.json` (or `_1000`), `items_ins_v2.json`, `items_human_ins.json`, optionally
`reviews.json`.

Goal order (`random.seed(233)`) and splits (first 500 for testing, from 1,500 for training) are the original's; price
ranges and limits are seeded, so all workers see one shop.
"""

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from offbeat.envs.webshop.catalogue import (
    NO_PRICE_LIMIT,
    Catalogue,
    Goal,
    Product,
    price_limits,
)

SHUFFLE_SEED = 233
NUM_TEST, FIRST_TRAIN = 500, 1_500
DEFAULT_PRICE = 100.0

Row = dict[str, Any]


def load_catalogue(folder: Path, num_products: int | None, *, human_goals: bool) -> Catalogue:
    """Load a shop. Raises ValueError if a file is missing or malformed."""
    items_file = "items_shuffle.json" if (folder / "items_shuffle.json").is_file() else "items_shuffle_1000.json"
    attributes: dict[str, Row] = _read(folder / "items_ins_v2.json")
    instructions: dict[str, list[Row]] = _read(folder / "items_human_ins.json") if human_goals else {}
    reviews = (
        {row["asin"]: row for row in _read(folder / "reviews.json")} if (folder / "reviews.json").is_file() else {}
    )
    rows: list[Row] = _read(folder / items_file)[:num_products]
    draws = random.Random(SHUFFLE_SEED)
    try:
        products = list(_products(rows, attributes, reviews, draws))
        unpriced_goals = _human_goals(products, instructions) if human_goals else _synthetic_goals(products, attributes)
        goals = [_with_price(goal, draws) for goal in unpriced_goals]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} does not hold WebShop's data: {type(error).__name__}: {error}") from error
    random.Random(SHUFFLE_SEED).shuffle(goals)
    if not goals:
        raise ValueError(f"{folder} has no goals for its first {len(products)} products: raise num_products")
    small = len(goals) <= FIRST_TRAIN
    eighth = max(1, len(goals) // 8)
    return Catalogue(products, goals, eighth if small else NUM_TEST, eighth if small else FIRST_TRAIN)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"no {path.name} in {path.parent}: WebShop's data has items_shuffle.json, items_ins_v2.json and "
            "items_human_ins.json; leave data_dir unset to use a generated shop"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _products(
    rows: list[Row], attributes: dict[str, Row], reviews: dict[str, Row], draws: random.Random
) -> Iterator[Product]:
    known_asins: set[str] = set()
    for row in rows:
        asin: str = row["asin"]
        if asin == "nan" or len(asin) > 10 or asin in known_asins:
            continue
        known_asins.add(asin)
        prices = _prices(row.get("pricing"))
        bullets: object = row["small_description"]
        review_row = reviews.get(asin, {})
        yield Product(
            asin=asin,
            title=row["name"],
            query=row["query"].lower().strip(),
            product_category=row["product_category"],
            price=prices[0] if len(prices) == 1 else draws.uniform(prices[0], prices[1]),
            price_tag=" to ".join(f"${price}" for price in prices),
            attributes=tuple(attributes.get(asin, {}).get("attributes", ["DUMMY_ATTR"])),
            bullet_points=_texts(bullets),
            description=row["full_description"] or "",
            options=_options(row.get("customization_options")),
            rating=str(review_row.get("average_rating", "N.A.")),
            reviews=tuple(str(review.get("review", "")) for review in review_row.get("reviews", ())),
        )


def _prices(text: str | None) -> list[float]:
    prices = [float(re.sub(r"[^\d.]", "", part)) for part in (text or "").split("$")[1:]]
    return prices[:2] or [DEFAULT_PRICE]


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(text) for text in cast(list[object], value)) if isinstance(value, list) else (str(value),)


def _options(value: dict[str, list[Row] | None] | str | None) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        return {}
    return {
        name.lower(): tuple(content["value"].strip().replace("/", " | ").lower() for content in contents)
        for name, contents in value.items()
        if contents is not None
    }


def _human_goals(products: list[Product], instructions: dict[str, list[Row]]) -> Iterator[Goal]:
    for product in products:
        for row in instructions.get(product.asin, []):
            if row["instruction_attributes"]:
                options = tuple(row["instruction_options"])
                text = row["instruction"].strip(".")
                yield Goal(text, product, tuple(row["instruction_attributes"]), options, NO_PRICE_LIMIT)


def _synthetic_goals(products: list[Product], attributes: dict[str, Row]) -> Iterator[Goal]:
    for product in products:
        row = attributes.get(product.asin, {})
        text = row.get("instruction")
        if not text:
            continue
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            chosen = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            instruction = f"{text} with {chosen}" if chosen else text
            yield Goal(instruction, product, tuple(row["instruction_attributes"]), values, NO_PRICE_LIMIT)


def _with_price(goal: Goal, draws: random.Random) -> Goal:
    limits = price_limits(goal.product.price)
    if len(limits) < 2:
        return goal
    limit = max(draws.sample(limits, 2))
    text = f"{goal.instruction}, and price lower than {limit:.2f} dollars"
    return Goal(text, goal.product, goal.attributes, goal.options, limit)
