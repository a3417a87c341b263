"""The ranks of a communicator: how they come together, by which settings, and what they do as a team."""
