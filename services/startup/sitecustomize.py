"""Hide unusable packages (`services.torch_extensions`), then run the shadowed `sitecustomize`.

Run by Python's `site` before Offbeat can be imported.
"""

import os
import sys

FOLDER = os.path.dirname(os.path.abspath(__file__))

names, _, prefix = os.environ.get("OFFBEAT_HIDDEN_PACKAGES", "").partition("@")
if prefix == sys.prefix:
    for name in filter(None, names.split(",")):
        sys.modules[name] = None  # type: ignore[assignment]

sys.path = [path for path in sys.path if os.path.abspath(path or ".") != FOLDER]
own = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
if own is not None:
    sys.modules.setdefault("sitecustomize", own)
