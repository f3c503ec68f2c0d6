"""Verification that a pipeline trains a model as the plain model is trained."""

from vpipe.system.callable_module import make_callable
from vpipe.verify.verification import Verification, verify, verify_config

__all__ = ["Verification", "verify", "verify_config"]

make_callable(__name__)
