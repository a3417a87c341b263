"""A rank's part in a plan: its records, rounds of messages, and memory that ranks share."""
