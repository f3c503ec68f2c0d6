"""The measured costs of a model's blocks, the device and the links."""

from vpipe.profile.measuring import profile
from vpipe.system.callable_module import make_callable

__all__ = ["profile"]

make_callable(__name__)
