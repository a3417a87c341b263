"""A Llama-architecture model in NumPy, read from a GGUF file, whose key/value cache is sharded over MPI ranks.

One concern per file, in the order in which a run goes through them::

    processes     the ranks of the run, and failing on all of them together
    gguf_file     a GGUF file: metadata and dequantised tensors
    config        the numbers that shape the model
    vocabulary    the tokenizer, from the file's own tokens and merges
    unpacking     GGUF file -> flat float32 file, config and tokenizer
    weights       one such file per host, mapped by all its ranks
    chat          question -> prompt
    model         the layers
    generation    prefill over all ranks, then token after token
    report        what is printed and written
"""
