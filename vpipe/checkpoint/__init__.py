"""Checkpoints: saved beside the training, committed by a rename, verified, loaded under any other partition."""

from vpipe.checkpoint.directory import EVALUATION, checkpoints, evaluation_loss, newest, prune
from vpipe.checkpoint.loading import load
from vpipe.checkpoint.manifest import Manifest, read_manifest, verify
from vpipe.checkpoint.pretrained import export_pretrained, load_pretrained
from vpipe.checkpoint.saving import Saver, save

__all__ = [
    "EVALUATION",
    "Manifest",
    "Saver",
    "checkpoints",
    "evaluation_loss",
    "export_pretrained",
    "load",
    "load_pretrained",
    "newest",
    "prune",
    "read_manifest",
    "save",
    "verify",
]
