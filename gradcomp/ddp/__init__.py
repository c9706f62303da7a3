"""Gradients on the wire: the DDP communication hook, its plan of a bucket, its exchange and its counters."""
