"""The measured costs of a model's blocks, the device and the links."""
