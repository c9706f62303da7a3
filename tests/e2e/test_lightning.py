"""The callbacks under the real Lightning trainer."""

import pickle
import warnings

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pytorch_lightning as pl

from gradcomp.data import DataNormSparsifier, LinearScheduler, StepScheduler
from gradcomp.integrations.lightning import PostTrainingDataSparsity, TrainingAwareDataSparsity, _get_valid_name, names_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


class Inner(pl.LightningModule):
    """With a network in ``model``."""

    def __init__(self):
        super().__init__()
        self.model = network()

    def body(self, x):
        return self.model(x)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.body(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Itself(Inner):
    """Layers of its own, and two names that differ by a dot only."""

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * 36, 10)
        self.head_bias = nn.Parameter(torch.zeros(10))

    def body(self, x):
        return self.head(self.conv(x).relu().flatten(1)) + self.head_bias


def fit(module, callback, epochs, **options_of_fit):
    data = torch.utils.data.TensorDataset(torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,)))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=epochs, callbacks=[callback], accelerator="cpu", **options)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8), **options_of_fit)
    return trainer


@pytest.mark.parametrize("kind", [Inner, Itself])
def test_after_training_a_copy_is_sparse(kind):
    module, callback = kind(), PostTrainingDataSparsity(DataNormSparsifier, {"sparsity_level": 0.5, "sparse_block_shape": (1, 1)})
    assert callback.sparsified is None
    fit(module, callback, 1)
    assert isinstance(callback.sparsified, nn.Module)
    trained = dict((module.model if kind is Inner else module).named_parameters())
    for name, p in callback.sparsified.named_parameters():
        assert abs(float((p == 0).float().mean()) - 0.5) < 0.06, name
        assert float((trained[name] == 0).float().mean()) < 0.1, "the model itself stays as it is"
        left = p != 0
        assert torch.equal(p[left], trained[name][left])
        assert callback.data_sparsifier.get_mask(names_of(callback.sparsified)[name]).shape == p.shape
    if kind is Inner:
        assert callback.data_sparsifier.get_mask(_get_valid_name("0.weight")).shape == (4, 1, 3, 3)


@pytest.mark.parametrize("kind", [Inner, Itself])
def test_during_training_masks_and_settings_go_from_epoch_to_epoch(kind):
    arguments = {"schedule_param": "sparsity_level", "steps": 2}
    callback = TrainingAwareDataSparsity(
        DataNormSparsifier, {"sparsity_level": 0.8, "sparse_block_shape": (1, 1)}, LinearScheduler, arguments
    )
    module = kind()
    fit(module, callback, 3)
    assert callback.data_scheduler.last_epoch == 3
    for name, p in callback.sparsified.named_parameters():
        assert abs(float((p == 0).float().mean()) - 0.8) < 0.1, "the level has risen to 0.8, and its mask is squashed"
        valid = names_of(callback.sparsified)[name]
        assert callback.data_sparsifier.data_groups[valid]["sparsity_level"] == pytest.approx(0.8)
    assert set(callback.data_sparsifier_state_dict) == {"state", "data_groups", "_container"}
    saved = callback.state_dict()
    assert saved["data_scheduler"]["last_epoch"] == 3


def test_names_without_dots_unless_two_would_be_one():
    assert names_of(Itself()) == {
        "conv.weight": "conv_weight",
        "conv.bias": "conv_bias",
        "head.weight": "head_weight",
        "head.bias": "head.bias",
        "head_bias": "head_bias",
    }


def test_a_resumed_training_goes_on_with_the_schedule(tmp_path):
    def callback():
        settings = {"sparsity_level": 0.8, "sparse_block_shape": (1, 1)}
        return TrainingAwareDataSparsity(DataNormSparsifier, settings, StepScheduler, {"schedule_param": "sparsity_level", "gamma": 0.5})

    first, module = callback(), Inner()
    fit(module, first, 2).save_checkpoint(tmp_path / "checkpoint")
    pickle.dumps(first.data_scheduler)
    again = callback()
    fit(Inner(), again, 4, ckpt_path=tmp_path / "checkpoint", weights_only=False)
    assert again.data_scheduler.last_epoch == 4
    assert [config["sparsity_level"] for config in again.data_sparsifier.data_groups.values()] == [pytest.approx(0.05)] * 4
