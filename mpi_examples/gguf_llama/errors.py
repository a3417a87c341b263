"""The one exception for what a user can put right."""

from __future__ import annotations

from treeattn.errors import TreeattnError

__all__ = ["LlamaError"]


class LlamaError(TreeattnError):
    """A model file, prompt or option that can't be used; the message is one sentence."""
