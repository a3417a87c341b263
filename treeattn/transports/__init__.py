"""Messages between ranks: the interface, MPI behind it, and wires that are only emulated."""
