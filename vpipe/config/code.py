"""The code that a configuration names: `module:function` as the value of a key.

Nothing is imported unless a key names it. Modules are looked for in the directories of `python_path`, in the
configuration's own folder, in the current one, and then among the installed packages.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vpipe.errors import ConfigError

if TYPE_CHECKING:
    from vpipe.config.keys import RunConfig

CODE_KEYS = ("model", "data", "loss", "loss_weight", "compute_metrics")
"""Keys whose value may be the name of a function."""
_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_CODE = re.compile(rf"({_NAME}):({_NAME})")
_OURS = Path(__file__).parents[1]


def names_code(value: Any) -> bool:
    """Whether a value of a key is `module:function`."""
    return isinstance(value, str) and _CODE.fullmatch(value) is not None


def code_directories(config: RunConfig) -> list[Path]:
    """Where the modules are looked for before the installed packages, as absolute paths."""
    written = [config.path(directory) for directory in config.python_path]
    return list(dict.fromkeys(path.absolute() for path in (*written, config.source.parent, Path())))


def load_function(config: RunConfig, key: str) -> Callable[..., Any]:
    """The function (or class) that the key names."""
    written = getattr(config, key)
    found = _CODE.fullmatch(written)
    assert found is not None, written
    module, name = found.groups()
    place = f"{config.source}: {key} is {written!r}"
    value: Any = _import(module, code_directories(config), place)
    home = getattr(value, "__file__", None) or module
    for part in name.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"{place}: {home} has no {name!r}: {_similar(value, part)}")
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(
            f"{place}: {name!r} of {home} is of type {type(value).__name__}, not a function: name a function or a class"
        )
    return value


def find_module(config: RunConfig, key: str) -> str | None:
    """The file, or the folder of the package, that has the module that the key names; None: it is not here.

    Nothing is imported: a host can be asked before it runs anything.
    """
    parts = getattr(config, key).partition(":")[0].split(".")
    path = [*map(str, code_directories(config)), *sys.path]
    invalidate_caches()
    places: list[str] = []
    for count in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:count]), path)
        if found is None:
            return None
        path = list(found.submodule_search_locations or ())
        places.append(path[0] if path else str(found.origin))
    return places[0]


def call_function(config: RunConfig, key: str) -> Any:
    """The result of the function that the key names; it is given the configuration if it has a parameter `config`."""
    function, place = load_function(config, key), f"{config.source}: {key} is {getattr(config, key)!r}"
    given = {}
    for name, parameter in _parameters(function).items():
        if name == "config":
            given[name] = config
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise ConfigError(
                f"{place}: it needs an argument {name!r}: give it a default value, or name it `config` to get the "
                "run's configuration"
            )
    try:
        return function(**given)
    except Exception as error:
        raise ConfigError(f"{place}: it raised {describe_error(error)}") from error


def takes_config(config: RunConfig, key: str) -> bool:
    """Whether the function that the key names is given the configuration."""
    return "config" in _parameters(load_function(config, key))


def describe_error(error: BaseException) -> str:
    """An error of a user's code in one line, with its place there."""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}{': ' if message else ''}{message}{_place(error)}"


def _import(module: str, directories: list[Path], place: str) -> Any:
    names = [str(directory) for directory in directories]
    sys.path[:] = [*names, *(name for name in sys.path if name not in names)]
    _forget_another(module, names)
    invalidate_caches()
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            looked = " nor ".join(map(str, directories))
            raise ConfigError(
                f"{place}: there is no module {error.name!r}, neither in {looked} nor among the installed packages: "
                "put it there, or set python_path"
            ) from None
        raise ConfigError(f"{place}: importing it failed with {describe_error(error)}") from error
    except SyntaxError as error:
        line = f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
        raise ConfigError(f"{place}: importing it failed with {type(error).__name__} (at {line})") from error
    except Exception as error:
        raise ConfigError(f"{place}: importing it failed with {describe_error(error)}") from error


def _forget_another(module: str, directories: list[str]) -> None:
    """Let go of a module of the same name that was imported from elsewhere, for another configuration."""
    top = module.partition(".")[0]
    loaded, wanted = sys.modules.get(top), PathFinder.find_spec(top, directories)
    if loaded is None or wanted is None or wanted.origin == getattr(loaded, "__file__", None):
        return
    for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
        del sys.modules[name]


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C
        return {}


def _similar(owner: Any, name: str) -> str:
    from difflib import get_close_matches

    public = [other for other in dir(owner) if not other.startswith("_")]
    close = get_close_matches(name, public, 1)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(public[:6]) or 'nothing'}"


def _place(error: BaseException) -> str:
    """The innermost line of the user's own code in the error's traceback."""
    libraries = [_OURS, *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib"))]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).exists()
        and not any(Path(frame.filename).is_relative_to(p) for p in libraries)
    ]
    if not frames:
        return ""
    frame = frames[-1]
    return f" (at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"
