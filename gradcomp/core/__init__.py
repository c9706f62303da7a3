"""The mask core: which elements matter, their indices and values, their bytes, and what was left behind.

Knows tensors. Knows nothing of networks, process groups or models.
"""
