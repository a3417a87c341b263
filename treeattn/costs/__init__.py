"""What a plan will take: constants with their sources, the cost model, and the cheapest plan by it."""
