"""A small shop in the files that WebShop publishes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Mapping[str, Any]


def make_item(number: int, **changes: object) -> dict[str, Any]:
    """Return a product of items_shuffle.json, with the published keys that are read and some that are not."""
    return {
        "asin": f"B{number:09d}",
        "name": f"Acme lamp {number}",
        "query": "Desk Lamps ",
        "product_category": "Home › Lamps",
        "category": "home",
        "pricing": "$10.00",
        "list_price": "",
        "availability_status": "In Stock.",
        "small_description": ["bright", "small"],
        "full_description": "A lamp.",
        "customization_options": {
            "Color": [{"is_selected": False, "value": "Red/Blue", "image": None, "url": None}, {"value": "green"}],
            "Size": None,
        },
        "images": [""],
        "seller_id": None,
        **changes,
    }


def make_goal(**changes: object) -> dict[str, Any]:
    """Return one of a product's goals in items_human_ins.json."""
    return {
        "asin": "B000000001",
        "options": "color: green",
        "instruction": "i want a lamp.",
        "attributes": ["bright", "small"],
        "instruction_attributes": ["bright"],
        "instruction_options": ["green"],
        **changes,
    }


def write_files(folder: Path, items: Sequence[Rows], attributes: Rows, goals: Mapping[str, Sequence[Rows]]) -> Path:
    files = {"items_shuffle.json": items, "items_ins_v2.json": attributes, "items_human_ins.json": goals}
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def write_shop(folder: Path, num_products: int) -> Path:
    """Write a shop with one human goal for each product."""
    items = [make_item(number, pricing=f"${10 + number}.00") for number in range(1, num_products + 1)]
    synthetic = {"attributes": ["bright"], "instruction": "a lamp", "instruction_attributes": ["bright"]}
    asins = [item["asin"] for item in items]
    return write_files(folder, items, dict.fromkeys(asins, synthetic), {asin: [make_goal(asin=asin)] for asin in asins})
