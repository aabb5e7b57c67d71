"""BM25 search over titles, attributes, descriptions, features and options (bm25s)."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from offbeat.envs.optional_imports import require
from offbeat.envs.webshop.catalogue import Product

MAX_RESULTS = 50


class ProductSearch:
    def __init__(self, products: Sequence[Product]) -> None:
        """Raises ValueError without bm25s."""
        self._products = products
        self._index: Any = require("bm25s", "webshop").BM25()
        self._index.index([words(_text(product)) for product in products], show_progress=False)

    def __call__(self, query: str) -> list[Product]:
        """Return at most 50 products, best first."""
        query_words = words(query)
        if not query_words:
            return []
        scores = np.asarray(self._index.get_scores(query_words))
        best = np.argsort(-scores, kind="stable")[:MAX_RESULTS]
        return [self._products[int(i)] for i in best if scores[i] > 0]


def words(text: str) -> list[str]:
    """Return lower-case words, without plural `s`."""
    return [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in re.findall(r"\w+", text.lower())]


def _text(product: Product) -> str:
    choices = (value for values in product.options.values() for value in values)
    parts = (product.title, product.query, *product.attributes, *product.bullet_points, product.description, *choices)
    return " ".join(parts)
