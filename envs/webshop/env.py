"""WebShop as a text env: `search[words]`, then `click[element]`, until a purchase.

Invariants: the goal is the only randomness; envs with equal settings share one read-only shop per process.
"""

import re
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Text
from gymnasium.utils import seeding
from pydantic import Field, field_validator, model_validator

from offbeat.envs.config import Config
from offbeat.envs.parsing import WHOLE_PATTERN, compile_pattern
from offbeat.envs.webshop.catalogue import Catalogue, Goal
from offbeat.envs.webshop.dataset import load_catalogue
from offbeat.envs.webshop.files import ShopFiles
from offbeat.envs.webshop.generator import MAX_PRODUCTS, SHOP_WORDS, make_catalogue
from offbeat.envs.webshop.pages import (
    BUY,
    SEPARATOR,
    ItemPage,
    Page,
    ResultsPage,
    SearchPage,
    click,
    clickables,
    element_key,
    page_text,
)
from offbeat.envs.webshop.reward import PurchaseReward, PurchaseScorer
from offbeat.envs.webshop.search import ProductSearch

SYSTEM_PROMPT = "Buy what the instruction asks for . Answer search[ words ] or click[ text ] ."
_PAGE_WORDS = (
    "Instruction: [SEP] Search search[ click[ ] Back to Page (Total results: Next > < Prev Price: Rating: N.A. ( ) Buy Now "
    "Description Features Reviews Attributes no reviews back search next prev buy now description features attributes"
)
WORDS = tuple(
    dict.fromkeys(
        [*SYSTEM_PROMPT.split(), *_PAGE_WORDS.split(), *SHOP_WORDS]
        + [f"{number})" for number in range(51)]
        + [str(number) for number in range(10)]
    )
)
"""For a word-level tokenizer, with a generated shop."""
ACTION = re.compile(r"(search|click)\s*\[(.*)\]", re.DOTALL | re.IGNORECASE)
PRINTABLE = "".join(map(chr, range(32, 127))) + "\n\t›"
MAX_CHARS = 100_000
FILE_KEYS = ("items_file", "attributes_file", "human_goals_file")


class WebShopConfig(Config):
    data_dir: Path | None = None
    """Folder of the files that WebShop publishes; None generates a shop."""
    items_file: Path | None = None
    """Products, from `data_dir`; None: items_shuffle.json or items_shuffle_1000.json."""
    attributes_file: Path | None = None
    """Attributes and synthetic goals, from `data_dir`; None: items_ins_v2.json or items_ins_v2_1000.json."""
    human_goals_file: Path | None = None
    """Goals that people wrote, from `data_dir`; None: items_human_ins.json."""
    num_products: int = Field(default=500, ge=10)
    """Number of products; with `data_dir`, the file's first."""
    human_goals: bool = True
    """With `data_dir`: human-written instead of synthetic instructions."""
    catalogue_seed: int = Field(default=0, ge=0)
    """Seed of the generated shop."""
    split: Literal["train", "held_out", "any"] = "train"
    """Training never uses held-out goals."""
    show_instruction: Literal["first", "always"] = "always"
    """Pages with the instruction."""
    show_actions: bool = False
    """Append the clickable elements to each page."""
    action_pattern: str = WHOLE_PATTERN
    """Regular expression; the last group is the action."""
    format_penalty: float = Field(default=0.0, le=0)
    """Reward of an answer that is neither a search nor a click."""
    max_steps: int | None = Field(default=None, ge=1)
    """Turns until truncation; None: the tag's `max_steps`."""
    render_mode: Literal["ansi"] | None = None

    @field_validator("action_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern

    @field_validator("num_products")
    @classmethod
    def _shop_can_be_generated(cls, number: int, info: Any) -> int:
        if info.data.get("data_dir") is None and number > MAX_PRODUCTS:
            raise ValueError(f"a generated shop has at most {MAX_PRODUCTS:,} products")
        return number

    @model_validator(mode="after")
    def _files_have_a_folder(self) -> "WebShopConfig":
        named = [key for key in FILE_KEYS if getattr(self, key) is not None]
        if named and self.data_dir is None:
            raise ValueError(f"{', '.join(named)} has no effect without data_dir, the folder of WebShop's files")
        if self.human_goals_file is not None and not self.human_goals:
            raise ValueError("human_goals_file has no effect with human_goals: false")
        return self

    @property
    def files(self) -> ShopFiles | None:
        if self.data_dir is None:
            return None
        return ShopFiles(self.data_dir, self.items_file, self.attributes_file, self.human_goals_file)


class WebShopEnv(gymnasium.Env[str, str]):
    """Shopping by search and clicks; the paper's reward, in [0, 1], for the purchase. `success` is 1."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}  # pyright: ignore[reportIncompatibleVariableOverride]
    config_class: ClassVar[type[WebShopConfig]] = WebShopConfig
    metrics_agg_mode: ClassVar[dict[str, str]] = dict.fromkeys(("r_type", "r_att", "r_option", "r_price"), "last")
    system_prompt: str = SYSTEM_PROMPT

    def __init__(self, config: WebShopConfig | None = None) -> None:
        self.config = config or WebShopConfig()
        self.render_mode = self.config.render_mode
        self._catalogue, self._search = _shop(
            self.config.files, self.config.num_products, self.config.human_goals, self.config.catalogue_seed
        )
        self._goals = self._catalogue.split(self.config.split)
        self._score = PurchaseScorer()
        self._pattern = compile_pattern(self.config.action_pattern)
        self._goal: Goal | None = None
        self._page: Page = SearchPage()
        self._steps = 0

    @cached_property
    def observation_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        charset = PRINTABLE if self.config.data_dir is None else "".join(map(chr, range(9, 0x2FFF)))
        return Text(max_length=MAX_CHARS, charset=charset)

    @cached_property
    def action_space(self) -> Text:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Text(min_length=0, max_length=MAX_CHARS, charset=PRINTABLE)

    @property
    def goal(self) -> Goal:
        """Raises RuntimeError before `reset`."""
        if self._goal is None:
            raise RuntimeError("call reset() before step() and render()")
        return self._goal

    @property
    def page(self) -> Page:
        return self._page

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._goal, self._page, self._steps = self._draw_goal(self.np_random), SearchPage(), 0
        return self._observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        goal, before = self.goal, self._page
        self._steps += 1
        purchase = None
        match self._parse(action):
            case ("search", words):
                self._page = ResultsPage(self._search(words))
            case ("click", text) if text == BUY and isinstance(before, ItemPage):
                purchase = self._score(goal, before.product, before.chosen)
            case (_, text):
                self._page = click(before, text)
            case None:
                return self._result(before, self.config.format_penalty, None, valid=False)
        return self._result(before, purchase.reward if purchase else 0.0, purchase, valid=True)

    def task_id(self, seed: int) -> str:
        goal = self._draw_goal(seeding.np_random(seed)[0])
        return f"{goal.product.asin} {goal.instruction}"

    def random_answer(self, rng: np.random.Generator) -> str:
        elements = list(clickables(self._page).values())
        if not elements:
            return f"search[ {self.goal.product.query} ]"
        return f"click[ {elements[int(rng.integers(len(elements)))]} ]"

    def render(self) -> str | None:
        return self._observation() if self.render_mode == "ansi" else None

    def _draw_goal(self, rng: np.random.Generator) -> Goal:
        return self._goals[int(rng.integers(len(self._goals)))]

    def _parse(self, answer: str) -> tuple[str, str] | None:
        """Return (search, words) or (click, element), or None."""
        answer_match = self._pattern.search(answer)
        match = answer_match and ACTION.search(answer_match[answer_match.lastindex or 0])
        if not match:
            return None
        name, argument = match[1].lower(), " ".join(match[2].split())
        if name == "search":
            return ("search", argument) if argument and isinstance(self._page, SearchPage) else None
        element = clickables(self._page).get(element_key(argument))
        return None if element is None else ("click", element)

    def _result(
        self, before: Page, reward: float, purchase: PurchaseReward | None, *, valid: bool
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        info: dict[str, Any] = {
            "success": purchase is not None and purchase.reward == 1.0,
            "bought": purchase is not None,
            "action_is_valid": valid,
            "action_is_effective": purchase is not None or self._page is not before,
            "format_penalty": 0.0 if valid else self.config.format_penalty,
        }
        if purchase is not None:
            info |= {
                "r_type": purchase.r_type,
                "r_att": purchase.r_att,
                "r_option": purchase.r_option,
                "r_price": purchase.r_price,
            }
        truncated = self.config.max_steps is not None and self._steps >= self.config.max_steps
        return self._observation(), reward, purchase is not None, truncated, info

    def _observation(self) -> str:
        shows_instruction = self._steps == 0 or self.config.show_instruction == "always"
        parts = ["Instruction:", self.goal.instruction] if shows_instruction else []
        text = SEPARATOR.join([*parts, page_text(self._page)])
        if not self.config.show_actions:
            return text
        elements = [f"click[{action}]" for action in clickables(self._page).values()] or ["search[words]"]
        return f"{text}\nActions: {', '.join(elements)}"


@lru_cache(maxsize=4)
def _shop(
    files: ShopFiles | None, num_products: int, human_goals: bool, catalogue_seed: int
) -> tuple[Catalogue, ProductSearch]:
    if files is None:
        catalogue = make_catalogue(catalogue_seed, num_products)
    else:
        catalogue = load_catalogue(files, num_products, human_goals=human_goals)
    return catalogue, ProductSearch(catalogue.products)
