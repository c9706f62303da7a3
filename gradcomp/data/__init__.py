"""Tensors at rest: data sparsifiers, their schedulers, and quantized embeddings."""

from gradcomp.data.base import EMBEDDING_TYPES, SUPPORTED_TYPES, BaseDataSparsifier
from gradcomp.data.masks import FakeSparsity
from gradcomp.data.norm import DataNormSparsifier, ThresholdSparsifier
from gradcomp.data.quantize import QuantizedEmbedding, QuantizedEmbeddingBag, post_training_sparse_quantize
from gradcomp.data.schedule import BaseDataScheduler, CubicScheduler, ExponentialScheduler, LinearScheduler, StepScheduler
from gradcomp.errors import DataError

__all__ = [
    "EMBEDDING_TYPES",
    "SUPPORTED_TYPES",
    "BaseDataScheduler",
    "BaseDataSparsifier",
    "CubicScheduler",
    "DataError",
    "DataNormSparsifier",
    "ExponentialScheduler",
    "FakeSparsity",
    "LinearScheduler",
    "QuantizedEmbedding",
    "QuantizedEmbeddingBag",
    "StepScheduler",
    "ThresholdSparsifier",
    "post_training_sparse_quantize",
]
