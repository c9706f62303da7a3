"""Imported once by the fork server: the compiled kernels, which every rank would otherwise load by itself."""

from gradcomp.core.compiled import kernels

kernels()
