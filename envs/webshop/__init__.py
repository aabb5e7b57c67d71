"""WebShop (arXiv:2207.01206) as text."""

from offbeat.envs.webshop.env import WORDS, WebShopConfig, WebShopEnv

__all__ = ["WORDS", "WebShopConfig", "WebShopEnv"]
