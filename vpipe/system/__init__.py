"""The machine under a process: its device and memory, files, environment, and faults on purpose."""
