"""`python -m vpipe`, which is how the launcher starts the ranks."""

from vpipe.cli import main

main()
