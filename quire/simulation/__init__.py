"""Simulation: the real scheduler and block manager under a virtual clock, on hardware that is described by numbers."""
