"""One call after another on the same ranks: what was agreed, what is under way, and the short ways."""
