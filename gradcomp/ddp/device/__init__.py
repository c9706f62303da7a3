"""The hook where gradients are not on the CPU: the same steps and the same bytes, in static shapes, and the host never waits."""
