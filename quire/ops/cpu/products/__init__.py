"""Products with weights: plain, quantised and of experts, and how their weights are packed."""
