"""Gradients across slow networks: a DDP communication hook that sends what matters, keeps the rest, and counts every byte."""

from gradcomp import data, optim
from gradcomp.core import codec, schedule
from gradcomp.core.rules import Dense, Threshold, TopK
from gradcomp.core.selection import Selection, compress, compress_gradients, decompress, decompress_gradients
from gradcomp.ddp.analysis import Analysis
from gradcomp.ddp.folder import load, save
from gradcomp.ddp.handle import Handle
from gradcomp.ddp.hook import sparse_hook
from gradcomp.ddp.register import register
from gradcomp.ddp.state import SparseState
from gradcomp.ddp.traffic import Traffic
from gradcomp.errors import AccountingError, DesyncError, GradcompError, NonFiniteError, PayloadError

__version__ = "0.1.0"

__all__ = [
    "AccountingError",
    "Analysis",
    "Dense",
    "DesyncError",
    "GradcompError",
    "Handle",
    "NonFiniteError",
    "PayloadError",
    "Selection",
    "SparseState",
    "Threshold",
    "TopK",
    "Traffic",
    "codec",
    "compress",
    "compress_gradients",
    "data",
    "decompress",
    "decompress_gradients",
    "load",
    "optim",
    "register",
    "save",
    "schedule",
    "sparse_hook",
]
