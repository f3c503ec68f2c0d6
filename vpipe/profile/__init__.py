"""What a model's blocks, the device and the links cost, measured."""

from vpipe.profile.model import profile_model

__all__ = ["profile_model"]
