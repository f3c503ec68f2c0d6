"""A run that is over in a moment."""

from typing import Any

MODEL: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 300,
    "sequence_length": 16,
    "batch_size": 4,
}
"""What the server has captured."""
TINY: dict[str, Any] = MODEL | {
    "data_dir": "text",
    "machines": ["localhost:0", "localhost:1"],
    "schedule": "vpipe",
    "learning_rate": 0.003,
    "print_frequency": 4,
    "timeout": 600,  # nothing is to end by the clock: the machine may be busy with others
    "heartbeat_limit": 60,
}
POEM = "the quick brown fox jumps over the lazy dog and runs along the river to the old mill\n"
