"""The record of a run: files and shared memory that its ranks write and observers read. Imports no torch."""
