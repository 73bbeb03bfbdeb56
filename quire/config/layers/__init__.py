"""What the layers of a family are: attention, experts, latents, states, positions."""
