"""Packages that can be called: `vpipe.verify(...)` is the function `verify` of the package `vpipe.verify`."""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A package that is named like its main function."""

    @property
    def _function(self) -> Callable[..., Any]:
        return self.__dict__[self.__name__.rpartition(".")[2]]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)


def make_callable(package: str) -> None:
    """Let a call of the package be one of the function in it that has its name; `help` describes that function."""
    module = sys.modules[package]
    module.__class__ = CallableModule
    module.__doc__ = module.__dict__[package.rpartition(".")[2]].__doc__
