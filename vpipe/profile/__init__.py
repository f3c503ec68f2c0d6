"""What a model's blocks, the device and the links cost, measured."""
