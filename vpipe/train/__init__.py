"""A training run by its configuration: what the launcher does first, and what each rank does."""
