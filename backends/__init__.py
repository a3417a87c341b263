"""Backends: which kernels run for which arrays, and how a state is merged, packed and finished there."""

if __name__ != "treeattn.backends":
    raise ImportError(f"import treeattn.backends, not {__name__}: the folder installs inside the package")
