"""Which rule a named tensor gets: a default, and overrides by glob of which the first match wins."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch

from gradcomp.core.rules import AnyRule, Dense, check_rule
from gradcomp.errors import warn

SMALL = 1024
"""Tensors with fewer elements, or with one dimension, stay dense unless an override says otherwise."""


class Policy:
    """A rule for every name.

    Args:
        default: the rule for tensors of two dimensions and more that no override matches.
        overrides: glob -> rule, tried in order.

    Raises:
        ValueError: something that is not a rule, naming the field.
    """

    def __init__(self, default: AnyRule, overrides: Mapping[str, AnyRule] | None = None) -> None:
        self.default = check_rule("rule", default)
        if overrides is not None and not isinstance(overrides, Mapping):
            raise ValueError(f"overrides must map a glob to a rule, got {overrides!r}")
        for glob in overrides or {}:
            if not isinstance(glob, str):
                raise ValueError(f"overrides must map a glob to a rule, got the key {glob!r}")
        self.overrides = {glob: check_rule(f"overrides[{glob!r}]", rule) for glob, rule in (overrides or {}).items()}

    def rule_for(self, name: str, shape: torch.Size) -> AnyRule:
        """The rule of the tensor ``name`` of ``shape``."""
        for glob, rule in self.overrides.items():
            if fnmatchcase(name, glob):
                return rule
        return Dense() if len(shape) < 2 or shape.numel() < SMALL else self.default

    def warn_unmatched(self, names: Iterable[str]) -> None:
        """Warn about overrides that match none of ``names``: most likely a typing error."""
        listed = list(names)
        for glob in self.overrides:
            if not any(fnmatchcase(name, glob) for name in listed):
                text = f"overrides[{glob!r}] matches no parameter; names are those of the network without wrappers, as {listed[0]!r}"
                warn(text)
