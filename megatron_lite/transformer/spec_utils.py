"""A layer is declared by a spec: which class, with which arguments, over which submodules.

    ModuleSpec(module=SelfAttention, params={...},
               submodules=SelfAttentionSubmodules(linear_qkv=ColumnParallelLinear, linear_proj=RowParallelLinear, ...))

`build_module(spec, *args, **kwargs)` is `spec.module(*args, **spec.params, **kwargs, submodules=spec.submodules)`.
Swapping a part is naming another class; nothing is subclassed for it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModuleSpec:
    """What to build.

    Args:
        module: a class (or function), or where to import it from: ("package.file", "Name").
        params: keyword arguments that belong to the declaration; those of the call win.
        submodules: handed to the constructor as `submodules`; None: not handed.
    """

    module: tuple[str, str] | type | Any
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build it: a spec can stand where a class is expected."""
        return build_module(self, *args, **kwargs)


def import_module(module_path: tuple[str, str]) -> Any:
    """The object `Name` of the module `package.file`. Raises ImportError if either is missing."""
    path, name = module_path
    module = importlib.import_module(path)
    if not hasattr(module, name):
        raise ImportError(f"{path} has no {name}: the spec names it")
    return getattr(module, name)


def spec_of_user(words: list[str] | None) -> Any:
    """What `--spec` names: a ModuleSpec or a block's submodules, made by a call where the name is a function's; None
    where the layers are the model's own (no words, or `local`)."""
    if not words or words == ["local"]:
        return None
    path, name = words
    recipe = import_module((path, name))
    return recipe() if callable(recipe) and not isinstance(recipe, ModuleSpec) else recipe


def get_module(spec_or_module: ModuleSpec | type | Any, **_: Any) -> Any:
    """The class (or function) that a spec names; anything else is returned as it is."""
    if not isinstance(spec_or_module, ModuleSpec):
        return spec_or_module
    module = spec_or_module.module
    return import_module(module) if isinstance(module, tuple) else module


def build_module(spec_or_module: ModuleSpec | type | Any, *args: Any, **kwargs: Any) -> Any:
    """An instance of what the spec or class names, or the function itself if it names one.

    Raises: whatever the constructor raises, with the name of the class added to its text.
    """
    module = get_module(spec_or_module)
    if not isinstance(module, type):
        return module
    params: dict[str, Any] = {}
    if isinstance(spec_or_module, ModuleSpec):
        params = dict(spec_or_module.params)
        if spec_or_module.submodules is not None:
            params["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **{**params, **kwargs})
    except TypeError as error:  # almost always a wrong argument: say for which class
        raise TypeError(f"{error} (while building {module.__name__})") from error
