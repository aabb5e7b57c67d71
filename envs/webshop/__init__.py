"""WebShop (arXiv:2207.01206) in words: find, configure and buy what an instruction asks for."""

from offbeat.envs.webshop.env import WORDS, WebShopConfig, WebShopEnv

__all__ = ["WORDS", "WebShopConfig", "WebShopEnv"]
