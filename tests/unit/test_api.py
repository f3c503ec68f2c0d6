"""What `dir(vpipe)` names: typed, described with all arguments, and on the page of the reference."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import vpipe
from tests.pages import read_page

PAGE = read_page("docs/api.md")


def described() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Name, function and docstring of everything that users call; the docstring of a class describes its arguments."""
    for name in vpipe.__all__:
        thing = getattr(vpipe, name)
        if inspect.ismodule(thing):
            thing = getattr(thing, name)
        yield name, thing, inspect.getdoc(thing) or ""
        if inspect.isclass(thing):
            for member, value in inspect.getmembers(thing):
                if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    function = value.fget if isinstance(value, property) else value
                    assert function is not None
                    if function.__module__.startswith("vpipe"):
                        yield f"{name}.{member}", function, inspect.getdoc(function) or ""


DESCRIBED = {name: (thing, text) for name, thing, text in described()}
DATA = ("Schedule", "VPipeError")
"""Classes that users are given and do not make."""


def test_everything_is_there() -> None:
    assert set(vpipe.__all__) <= set(dir(vpipe))
    assert {"Pipeline", "verify", "profile", "plan", "simulate", "Loader", "Run"} <= set(vpipe.__all__)


@pytest.mark.parametrize("name", DESCRIBED)
def test_every_argument_is_typed_and_described(name: str) -> None:
    thing, text = DESCRIBED[name]
    assert text, "no docstring"
    if name.split(".")[0] in DATA:
        return
    function = thing.__init__ if inspect.isclass(thing) else thing
    annotated = inspect.signature(function)
    for parameter in annotated.parameters.values():
        if parameter.name != "self":
            assert parameter.annotation is not parameter.empty, parameter.name
            assert re.search(rf"^    \**{parameter.name}: [A-Z`\"]", text, re.MULTILINE), parameter.name
    assert annotated.return_annotation is not inspect.Signature.empty


def test_every_described_argument_exists() -> None:
    for name, (thing, text) in DESCRIBED.items():
        function = thing.__init__ if inspect.isclass(thing) else thing
        arguments = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
        found = re.findall(r"^    \**(\w+): ", arguments[1], re.MULTILINE) if arguments else []
        assert set(found) <= set(inspect.signature(function).parameters), name


def test_the_reference_has_every_name() -> None:
    titles = set(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    assert set(vpipe.__all__) <= titles


@pytest.mark.parametrize("name", ["plan", "profile", "simulate", "verify"])
def test_help_describes_the_function_behind_a_package(name: str) -> None:
    package = getattr(vpipe, name)
    assert package.__doc__ == getattr(package, name).__doc__
