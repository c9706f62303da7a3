"""Every warning points at the user's own line, however deep in gradcomp it is found."""

import copy
import warnings

import pytest
import torch

import gradcomp
from gradcomp.data import BaseDataScheduler, DataNormSparsifier


class Halving(BaseDataScheduler):
    def get_schedule_param(self):
        return dict.fromkeys(self.data_sparsifier.data_groups, 0.5)


def net():
    return torch.nn.Sequential(torch.nn.Linear(40, 40))


def twice(sparsifier):
    sparsifier.add_data("a", torch.ones(4, 4))
    sparsifier.add_data("a", torch.ones(4, 4))


CAUSES = {
    "settings": lambda: gradcomp.SparseState(net(), gradcomp.Dense(), warmup_steps=5),
    "scaled fp16": lambda: gradcomp.SparseState(net(), values="fp16", grad_scaler=torch.amp.GradScaler("cpu")),
    "policy": lambda: gradcomp.SparseState(net(), overrides={"nothing": gradcomp.Dense()}),
    "copy": lambda: copy.deepcopy(gradcomp.SparseState(net())),
    "data": lambda: twice(DataNormSparsifier()),
    "order": lambda: Halving(DataNormSparsifier(), "sparsity_level").step(),
}


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_a_warning_points_out_of_gradcomp(cause):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CAUSES[cause]()
    ours = [warning for warning in caught if str(warning.message).startswith("gradcomp: ")]
    assert len(ours) == 1, [str(warning.message) for warning in caught]
    if cause == "copy":  # called by the standard library
        assert ours[0].filename == copy.__file__
    else:
        assert ours[0].filename == __file__
