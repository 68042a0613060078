"""Numbers only: orders, cycles and components, without torch."""
