"""What a call may look like: its arrays, options and positions, and the one error for each thing that is wrong."""
