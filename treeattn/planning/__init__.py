"""The tree as data, computed from host labels and radices; nothing here sends a message."""
