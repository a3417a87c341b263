"""The command line, with a fault planted on rank 1."""

import sys

import treeattn.cli.measurement
from treeattn.cli import main
from treeattn.launch import launched


def fail(*args: object, **options: object) -> None:
    raise RuntimeError("no memory on this rank")


if launched().rank == 1:
    treeattn.cli.measurement.measure = fail
main(sys.argv[1:])
