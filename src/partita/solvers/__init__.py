"""Graph algorithms on plain numbers, without torch: orders, cycles, components, few parts."""
