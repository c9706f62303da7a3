"""Thin layers over other libraries, each imported only by whoever uses it."""
