"""Configuration of the control service."""

import os.path
import re
import secrets
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from offbeat.envs.config import Config
from offbeat.services.control.rights import Rights, Scope, TokenGrant, Tokens
from offbeat.services.secret_file import create_secret_file

TOKEN_BYTES = 24
TOKEN = r"[ -~]*[!-~]"
"""What an HTTP header can carry."""


class RightsConfig(Config):
    """Code and folders that runs started over REST may name (SECURITY.md)."""

    allow_modules: tuple[str, ...] | None = None
    """Modules whose classes and functions they may name (`my_envs`, `offbeat.*`); None: any code."""
    output_roots: tuple[str, ...] | None = None
    """Folders and URLs below which they may write; None: any."""

    def to_rights(self, base: Path | None = None) -> Rights:
        """Convert to `Rights`. base: of local roots; None: current folder."""
        folder = base or Path.cwd()
        roots = self.output_roots
        absolute = (
            None if roots is None else tuple(r if "://" in r else str(folder / os.path.expanduser(r)) for r in roots)
        )
        return Rights(self.allow_modules, absolute)


class TokenConfig(RightsConfig):
    """One token of the API."""

    token: str | None = Field(default=None, min_length=1)
    token_file: Path | None = None
    """File with the token, instead of `token`."""
    scope: Scope = "write"
    """`read`: changes nothing."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenConfig":
        if (self.token is None) == (self.token_file is None):
            raise ValueError("set token or token_file, one of both")
        return self

    def to_grant(self, base: Path | None = None) -> TokenGrant:
        """Convert; raises as `read_token`. `token` itself is not checked: earlier builds accepted any."""
        return TokenGrant(self.token or read_token(self.token_file), self.scope, self.to_rights(base))


def find_token_problem(token: str) -> str | None:
    """Return why no call can carry a token."""
    if re.fullmatch(TOKEN, token):
        return None
    return "has characters that no call can carry: take printable ASCII, in one line, without a space at its end"


def read_token(path: Path | None) -> str:
    """Read a token; raises OSError, or ValueError if it is empty or can't be sent."""
    assert path is not None, "checked by the model"
    path = _at_home(path)
    if not (token := path.read_text().strip()):
        raise ValueError(f"{path} is empty")
    if problem := find_token_problem(token):
        raise ValueError(f"{path} {problem}")
    return token


def create_token(path: Path) -> str:
    """Read a token, after creating a random one if there is none; raises as `read_token`."""
    create_secret_file(_at_home(path), secrets.token_urlsafe(TOKEN_BYTES))
    return read_token(path)


def _at_home(path: Path) -> Path:
    return Path(os.path.expanduser(path))  # `Path.expanduser` fails for unknown users


class ControlConfig(RightsConfig):
    """REST API and reconciler."""

    host: str = "127.0.0.1"
    """Interface of the API; except loopback, it needs `token`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the API; 0: any free one."""
    token: str | None = None
    """Bearer token required of each call."""
    read_token: str | None = None
    """Second token, for read access."""
    tokens: tuple[TokenConfig, ...] = ()
    """Further tokens with rights of their own; `allow_modules` and `output_roots` above belong to `token`."""
    learner: Literal["managed", "external"] = "managed"
    """`managed`: the mesh starts and replaces it; `external`: the mesh waits for `offbeat learner attach`."""
    standby_learner: bool = False
    """Keep a second, started learner to replace a dead one; takes its memory on `actor_train.device`, too."""
    reconcile_s: float = Field(default=0.5, gt=0)
    """Interval of reconciliation, s."""

    def to_tokens(self, base: Path | None = None) -> Tokens:
        others = tuple(each.to_grant(base) for each in self.tokens)
        return Tokens(self.token, self.read_token, self.to_rights(base), others)

    @model_validator(mode="after")
    def _check_standby(self) -> "ControlConfig":
        if self.standby_learner and self.learner == "external":
            raise ValueError(
                "standby_learner has no effect with learner=external: attach a second learner instead, it stands by"
            )
        return self


class ControlTuning(Config):
    """Live settings of the service (`user_config` of its deployment)."""

    reconcile_s: float = Field(default=0.5, gt=0)
    """Interval of reconciliation, s."""
    max_restarts: int = Field(default=5, ge=0)
    """Deaths of a component without progress before its run fails."""
    drain_timeout_s: float = Field(default=60.0, gt=0)
    """Time of a graceful stop before the run is killed, s; a checkpoint that is being written is waited for."""
