"""The hook where gradients are not on the CPU: the same steps and bytes, in static shapes, without waiting for the step at hand."""
