"""Checkpoints: saved by all ranks, committed by a rename, verified, loaded under any other partition."""

from vpipe.checkpoint.directory import newest, prune
from vpipe.checkpoint.loading import load
from vpipe.checkpoint.manifest import Manifest, read_manifest, verify
from vpipe.checkpoint.pretrained import export_pretrained, load_pretrained
from vpipe.checkpoint.saving import save

__all__ = [
    "Manifest",
    "export_pretrained",
    "load",
    "load_pretrained",
    "newest",
    "prune",
    "read_manifest",
    "save",
    "verify",
]
