"""WebShop (arXiv:2207.01206) as text: find, configure and buy the product that an instruction describes."""

from offbeat.envs.webshop.env import WORDS, WebShopConfig, WebShopEnv

__all__ = ["WORDS", "WebShopConfig", "WebShopEnv"]
