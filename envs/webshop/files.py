"""Rows of WebShop's published files (princeton-nlp/WebShop, `setup.sh -d all` or `-d small`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


class ShopFiles(NamedTuple):
    """Paths of the files; None: the first published name in `folder`."""

    folder: Path
    items: Path | None = None
    attributes: Path | None = None
    human_goals: Path | None = None

    def find(self, kind: str) -> Path:
        """Return a file's path; raises ValueError if there is none."""
        named: Path | None = getattr(self, kind)
        candidates = PUBLISHED[kind] if named is None else (str(named),)
        paths = [self.folder / name for name in candidates]
        found = next((path for path in paths if path.is_file()), None)
        if found is None:
            raise ValueError(
                f"no {' or '.join(candidates)} in {self.folder}: WebShop's setup.sh downloads it; env_config.{kind}_file "
                "names another file; leave data_dir unset to use a generated shop"
            )
        return found


PUBLISHED = {
    "items": ("items_shuffle.json", "items_shuffle_1000.json"),
    "attributes": ("items_ins_v2.json", "items_ins_v2_1000.json"),
    "human_goals": ("items_human_ins.json",),
}
"""Names of all products and of the first thousand."""


class Option(msgspec.Struct):
    value: str


class Item(msgspec.Struct):
    """Product, of a list."""

    asin: str
    name: str
    query: str
    product_category: str
    small_description: list[Any] | str | None
    full_description: str | None
    pricing: str | None = None
    """`$10.99`, or `$5.00 to $9.00`."""
    customization_options: dict[str, list[Option] | None] | str | None = None


class ItemAttributes(msgspec.Struct):
    """Product by `asin`, with a synthetic goal."""

    attributes: list[str] | None = None
    instruction: str | None = None
    instruction_attributes: list[str] | None = None


class HumanGoal(msgspec.Struct):
    """Human-written goal; lists by `asin`."""

    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str] | dict[str, str]


class Review(msgspec.Struct):
    review: str = ""


class ItemReviews(msgspec.Struct):
    asin: str
    average_rating: Any = "N.A."
    reviews: list[Review] = msgspec.field(default_factory=list[Review])


def read_items(path: Path, num_products: int | None) -> list[Item]:
    """Return a file's first products; raises ValueError with file and product."""
    rows = decode(path.read_bytes(), list[msgspec.Raw], str(path), "a list of products")
    return [decode(row, Item, f"{path}, product {place}") for place, row in enumerate(rows[:num_products])]


def read_table(path: Path, kind: type[T], asins: Mapping[str, object]) -> dict[str, T]:
    """Return the rows of known products by `asin`; raises ValueError with file and product."""
    rows = decode(path.read_bytes(), dict[str, msgspec.Raw], str(path), "a mapping from asin")
    return {asin: decode(rows[asin], kind, f"{path}, product {asin}") for asin in asins if asin in rows}


def read_reviews(path: Path) -> dict[str, ItemReviews]:
    """Return reviews by product; raises ValueError."""
    return {row.asin: row for row in decode(path.read_bytes(), list[ItemReviews], str(path), "a list of reviews")}


def decode(text: bytes | msgspec.Raw, kind: type[T], where: str, wanted: str = "") -> T:
    """Decode JSON; raises ValueError with `where`."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        expected = f"expected {wanted}: " if wanted else ""
        raise ValueError(f"{where} is not as WebShop publishes it: {expected}{error}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
