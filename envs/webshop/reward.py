"""Reward of a purchase (arXiv:2207.01206, eq. 1 and 2).

reward = r_type * (attributes met + options met + price met) / (attributes + options of the goal + 1), in [0, 1].

Unlike the published code, title nouns are found by stop words, not spaCy, and chosen options must match the goal's, not
its title.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from offbeat.envs.optional_imports import require
from offbeat.envs.webshop.catalogue import Goal, Product

MIN_SIMILARITY = 85
"""Of matching texts (token-set ratio)."""
EXACT_OPTIONS = ("size",)
STOP_WORDS = frozenset(
    re.split(" ", "a an and are as at be by for from in is it of on or that the this to with you your our more new")
)


class PurchaseReward(NamedTuple):
    reward: float
    r_type: float
    r_att: float
    r_option: float
    """1 without options."""
    r_price: float


class PurchaseScorer:
    def __init__(self) -> None:
        """Raises ValueError without rapidfuzz."""
        fuzz, utils = require("rapidfuzz.fuzz", "webshop"), require("rapidfuzz.utils", "webshop")
        self._ratio: Any = fuzz.token_set_ratio
        self._process: Any = utils.default_process

    def __call__(self, goal: Goal, bought: Product, chosen: Mapping[str, str]) -> PurchaseReward:
        """chosen: option -> value."""
        r_type = type_reward(goal.product, bought)
        attributes = sum(self._has_attribute(bought, attribute) for attribute in goal.attributes)
        options = sum(self._is_chosen(option, chosen) for option in goal.options)
        price = float(bought.price <= goal.price_upper)
        total = len(goal.attributes) + len(goal.options) + 1
        return PurchaseReward(
            r_type * (attributes + options + price) / total,
            r_type,
            attributes / max(1, len(goal.attributes)),
            options / len(goal.options) if goal.options else 1.0,
            price,
        )

    def _has_attribute(self, product: Product, attribute: str) -> bool:
        if any(self._is_similar(own, attribute) for own in product.attributes):
            return True
        texts = (product.title, " ".join(product.bullet_points), product.description)
        return any(attribute in text.lower() for text in texts)

    def _is_chosen(self, option: str, chosen: Mapping[str, str]) -> bool:
        for name, value in chosen.items():
            exact = name.lower() in EXACT_OPTIONS
            if option.lower() == value if exact else self._is_similar(option, value):
                return True
        return False

    def _is_similar(self, a: str, b: str) -> bool:
        return self._ratio(a, b, processor=self._process) > MIN_SIMILARITY


def type_reward(target: Product, bought: Product) -> float:
    """Return 0 without common title words, .1 for few, 1 for an equal query, categories or title, else .5."""
    nouns = title_words(target.title)
    score = len(nouns & title_words(bought.title)) / len(nouns) if nouns else 0.2
    shared = _categories(target) & _categories(bought)
    if score == 0:
        return 0.0
    if score < 0.1:
        return 0.1
    return 1.0 if target.query == bought.query or len(shared) >= 2 or score > 0.2 else 0.5


def title_words(title: str) -> set[str]:
    """Return possible nouns of a title."""
    return {word for word in re.findall(r"[^\W\d_]+", title.lower()) if len(word) > 1} - STOP_WORDS


def _categories(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split("›")}
