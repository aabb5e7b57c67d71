"""Generated shop, determined by seed and size; texts use only `SHOP_WORDS`."""

from typing import NamedTuple

import numpy as np

from offbeat.envs.webshop.catalogue import (
    NO_PRICE_LIMIT,
    Catalogue,
    Goal,
    Product,
    price_limits,
)

HELD_OUT_SHARE = 8
MAX_PRODUCTS = 1_000

BRANDS = ("acme", "nova", "lumen", "orbit", "willow", "summit", "harbor", "ember", "quartz", "meadow")
COLORS = ("red", "blue", "green", "black", "white", "grey", "yellow", "purple")
SIZES = ("small", "medium", "large")


class _Kind(NamedTuple):
    category: str
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]


_WEAR = ("machine wash", "long sleeve", "slim fit", "waterproof", "cotton", "elastic waist")
_TECH = ("fast charging", "wireless", "noise cancelling", "stereo sound", "high speed", "water resistant")
_HOME = ("easy clean", "stainless steel", "solid wood", "space saving", "non slip", "heavy duty")
_CARE = ("sulfate free", "cruelty free", "natural ingredients", "long lasting", "fragrance free", "dry skin")
_FOOD = ("gluten free", "sugar free", "low calorie", "non gmo", "high protein", "caffeine free")
_SCENTS = ("lavender", "citrus", "mint", "rose")
_TASTES = ("vanilla", "chocolate", "lemon", "ginger")

_DEPARTMENTS: dict[str, tuple[str, tuple[str, ...], dict[str, tuple[str, ...]], tuple[str, ...]]] = {
    "fashion": ("clothing", _WEAR, {"color": COLORS, "size": SIZES}, ("shirt", "jacket", "dress", "shorts", "sweater")),
    "electronics": ("audio", _TECH, {"color": COLORS[3:]}, ("headphones", "speaker", "charger", "keyboard", "cable")),
    "home": ("furniture", _HOME, {"color": COLORS[:5], "size": SIZES}, ("lamp", "rug", "table", "shelf", "pillow")),
    "beauty": ("skin", _CARE, {"scent": _SCENTS, "size": SIZES[::2]}, ("shampoo", "lotion", "soap", "cream", "balm")),
    "grocery": ("snacks", _FOOD, {"flavor": _TASTES, "size": SIZES}, ("tea", "coffee", "cookies", "cereal", "bars")),
}
KINDS = {
    kind: _Kind(f"{department} › {section} › {kind}", attributes, options)
    for department, (section, attributes, options, kinds) in _DEPARTMENTS.items()
    for kind in kinds
}

_PHRASES = (
    "find me a with and , price lower than dollars for every day by it is : . $ 0 › A to in the of",
    *(f"{name}:" for kind in KINDS.values() for name in kind.options),
    *(f"{step:.2f}" for step in (10.0 * i for i in range(1, 25))),
    *(f"${price}.0" for price in range(5, 200)),
)


def _asin(number: int) -> str:
    return f"B{number:04d}"


SHOP_WORDS = tuple(
    dict.fromkeys(
        word
        for text in (
            *_PHRASES,
            *BRANDS,
            *(text for kind in KINDS.values() for text in (kind.category, *kind.attributes)),
            *(text for kind in KINDS.values() for name, values in kind.options.items() for text in (name, *values)),
            *(_asin(number) for number in range(MAX_PRODUCTS)),
        )
        for word in text.split()
    )
)


def make_catalogue(seed: int, num_products: int) -> Catalogue:
    """Return a shop of at most 1,000 products with two goals each; training has no goal that equals a held-out one."""
    rng = np.random.default_rng([seed, num_products])
    products = [_make_product(rng, number) for number in range(num_products)]
    goals = [_make_goal(rng, product) for product in products for _ in range(2)]
    order = rng.permutation(len(goals))
    held_out = max(1, len(goals) // HELD_OUT_SHARE)
    ordered = [goals[int(i)] for i in order]
    evaluated = {(goal.product.asin, goal.instruction) for goal in ordered[:held_out]}
    training = [goal for goal in ordered[held_out:] if (goal.product.asin, goal.instruction) not in evaluated]
    return Catalogue(products, ordered[:held_out] + training, held_out, held_out)


def _make_product(rng: np.random.Generator, number: int) -> Product:
    name = _choose(rng, list(KINDS), 1)[0]
    kind, brand = KINDS[name], _choose(rng, BRANDS, 1)[0]
    attributes = _choose(rng, kind.attributes, int(rng.integers(2, 5)))
    options = {
        option: _choose(rng, values, int(rng.integers(2, len(values) + 1))) for option, values in kind.options.items()
    }
    price = float(rng.integers(5, 200))
    return Product(
        asin=_asin(number),
        title=f"{brand} {attributes[0]} {name}",
        query=name,
        product_category=kind.category,
        price=price,
        price_tag=f"${price}",
        attributes=attributes,
        bullet_points=tuple(f"it is {attribute}" for attribute in attributes),
        description=f"a {name} for every day by {brand}",
        options=options,
    )


def _make_goal(rng: np.random.Generator, product: Product) -> Goal:
    attributes = _choose(rng, product.attributes, int(rng.integers(1, 3)))
    chosen = {name: _choose(rng, values, 1)[0] for name, values in product.options.items()}
    limits = price_limits(product.price)[1:]
    limit = float(rng.choice(limits)) if limits else NO_PRICE_LIMIT
    requirements = " , ".join([" and ".join(attributes), *(f"{name}: {value}" for name, value in chosen.items())])
    instruction = f"find me a {product.query} with {requirements} , price lower than {limit:.2f} dollars"
    return Goal(instruction, product, attributes, tuple(chosen.values()), limit)


def _choose(rng: np.random.Generator, texts: tuple[str, ...] | list[str], count: int) -> tuple[str, ...]:
    return tuple(texts[int(i)] for i in rng.permutation(len(texts))[:count])
