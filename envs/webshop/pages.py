"""Shop pages in WebShop's simple mode, separated by `[SEP]`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offbeat.envs.webshop.catalogue import Product

SEPARATOR = " [SEP] "
PAGE_SIZE = 10

BACK, NEXT, PREVIOUS, BUY = "Back to Search", "Next >", "< Prev", "Buy Now"
SECTIONS = ("Description", "Features", "Reviews", "Attributes")


@dataclass(frozen=True, slots=True)
class SearchPage:
    """First page of an episode."""


@dataclass(frozen=True, slots=True)
class ResultsPage:
    results: Sequence[Product]
    number: int = 1

    @property
    def shown(self) -> Sequence[Product]:
        return self.results[(self.number - 1) * PAGE_SIZE : self.number * PAGE_SIZE]

    @property
    def is_last(self) -> bool:
        return self.number * PAGE_SIZE >= len(self.results)


@dataclass(frozen=True, slots=True)
class ItemPage:
    """Product page with chosen options, or a section of it."""

    product: Product
    back: ResultsPage
    chosen: Mapping[str, str] = field(default_factory=dict[str, str])
    section: str = ""


Page = SearchPage | ResultsPage | ItemPage


def page_text(page: Page) -> str:
    match page:
        case SearchPage():
            parts = ["Search"]
        case ResultsPage():
            parts = [BACK, f"Page {page.number} (Total results: {len(page.results)})"]
            parts += [PREVIOUS] if page.number > 1 else []
            parts += [] if page.is_last else [NEXT]
            parts += [text for product in page.shown for text in (product.asin, product.title, product.price_tag)]
        case ItemPage(section=""):
            parts = [BACK, PREVIOUS]
            for name, values in page.product.options.items():
                parts += [name, *(f"( {value} )" if page.chosen.get(name) == value else value for value in values)]
            product = page.product
            parts += [product.title, f"Price: {product.price_tag}", f"Rating: {product.rating}", *SECTIONS, BUY]
        case ItemPage():
            parts = [BACK, PREVIOUS, *_section(page.product, page.section)]
    return SEPARATOR.join(parts)


def clickables(page: Page) -> dict[str, str]:
    """Return `element_key` -> clickable element."""
    match page:
        case SearchPage():
            elements: list[str] = []
        case ResultsPage():
            elements = [BACK, *([PREVIOUS] if page.number > 1 else []), *([] if page.is_last else [NEXT])]
            elements += [product.asin for product in page.shown]
        case ItemPage(section=""):
            elements = [BACK, PREVIOUS, *(value for values in page.product.options.values() for value in values)]
            elements += [*SECTIONS, BUY]
        case ItemPage():
            elements = [BACK, PREVIOUS]
    return {element_key(text): text for text in elements}


def element_key(text: str) -> str:
    """Return a text in lower case and with single spaces."""
    return " ".join(text.lower().split())


def click(page: Page, text: str) -> Page:
    """Return the next page; `text` is one of `clickables` except `Buy Now`."""
    if text == BACK:
        return SearchPage()
    match page:
        case ResultsPage():
            if text in (NEXT, PREVIOUS):
                return ResultsPage(page.results, page.number + (1 if text == NEXT else -1))
            return ItemPage(next(product for product in page.shown if product.asin == text), page)
        case ItemPage() if text == PREVIOUS:
            return ItemPage(page.product, page.back, page.chosen) if page.section else page.back
        case ItemPage() if text in SECTIONS:
            return ItemPage(page.product, page.back, page.chosen, text)
        case ItemPage():
            name = next(name for name, values in page.product.options.items() if text in values)
            return ItemPage(page.product, page.back, {**page.chosen, name: text})
        case SearchPage():
            raise ValueError("nothing can be clicked on the search page")


def _section(product: Product, section: str) -> list[str]:
    match section:
        case "Description":
            return [product.description]
        case "Features":
            return list(product.bullet_points)
        case "Reviews":
            return list(product.reviews) or ["no reviews"]
        case _:
            return [product.product_category, *product.attributes]
