"""The record of a run: written while it runs, read by those who observe it. Knows no torch."""
