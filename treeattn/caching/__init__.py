"""The tokens of a sharded cache: who holds which, in what memory, and who may change them when."""
