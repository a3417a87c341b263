"""``python -m treeattn``: the command line without its script."""

from treeattn.cli import main

main()
