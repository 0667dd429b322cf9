"""Room faces that cost nothing until a name is used.

A room's `__init__.py` offers its public names, but importing torch takes longer than all of `--help` may. So a face
lists where each name lives and imports that file when the name is first asked for (PEP 562):

    __getattr__, __dir__, __all__ = lazy_face(__name__, {
        "transformer_config": ["TransformerConfig"],        # file in this room -> names it offers
        "mlp": ["MLP", "MLPSubmodules"],
    })

Files of the room stay importable as attributes too (`megatron_lite.transformer.mlp`).
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def lazy_face(
    room: str, offers: dict[str, list[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for the room's `__init__.py`.

    Args:
        room: the room's `__name__`.
        offers: file in the room (without `.py`) -> the public names that it defines.
    """
    home = {name: f"{room}.{file}" for file, names in offers.items() for name in names}
    names = sorted(home)

    def get(name: str) -> Any:
        if name in home:
            value = getattr(importlib.import_module(home[name]), name)
        elif name in offers:
            value = importlib.import_module(f"{room}.{name}")
        else:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        setattr(sys.modules[room], name, value)  # next time without this function
        return value

    class Face(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            # Importing a file sets it as an attribute of its room. Where file and offer have one name
            # (`distributed.finalize_model_grads`), the offer must win whatever was imported first.
            if not (name in home and isinstance(value, ModuleType)):
                super().__setattr__(name, value)

    sys.modules[room].__class__ = Face
    return get, lambda: sorted({*names, *offers}), names
