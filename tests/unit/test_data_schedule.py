"""Schedulers of a data sparsifier's settings."""

import copy
import pickle

import pytest
import torch

import gradcomp
from gradcomp.data import (
    BaseDataScheduler,
    CubicScheduler,
    DataNormSparsifier,
    ExponentialScheduler,
    LinearScheduler,
    StepScheduler,
)


class Halving(BaseDataScheduler):
    def get_schedule_param(self):
        if self.last_epoch == 0:
            return self.base_param
        return {name: config[self.schedule_param] / 2 for name, config in self.data_sparsifier.data_groups.items()}


def sparsifier_with(*names, level=0.8):
    return DataNormSparsifier([(name, torch.randn(4, 4)) for name in names], sparsity_level=level)


def levels(sparsifier):
    return {name: config["sparsity_level"] for name, config in sparsifier.data_groups.items()}


def test_the_upstream_contract():
    sparsifier = sparsifier_with("a", "b")
    scheduler = Halving(sparsifier, "sparsity_level")
    assert scheduler.base_param == {"a": 0.8, "b": 0.8}
    assert (scheduler._step_count, scheduler.last_epoch) == (1, 0)
    sparsifier.enable_mask_update = False
    for epoch in range(3):
        sparsifier.step()
        scheduler.step()
        assert levels(sparsifier) == scheduler.get_last_param() == dict.fromkeys("ab", 0.8 / 2 ** (epoch + 1))
        assert sparsifier.enable_mask_update
    assert scheduler._step_count == 4
    with pytest.raises(TypeError, match=r"must be a gradcomp\.data\.BaseDataSparsifier, got a dict"):
        Halving({}, "sparsity_level")
    with pytest.raises(TypeError):
        BaseDataScheduler(sparsifier, "sparsity_level")
    assert "Halving" in repr(scheduler)


def test_the_wrong_order_is_warned_about_and_the_right_one_not():
    sparsifier = sparsifier_with("a")
    scheduler = Halving(sparsifier, "sparsity_level")
    with pytest.warns(UserWarning, match=r"scheduler.step\(\) was called before data_sparsifier.step\(\)"):
        scheduler.step()
    sparsifier = sparsifier_with("a")
    scheduler = Halving(sparsifier, "sparsity_level")
    sparsifier.step()
    scheduler.step()  # warnings are errors here
    sparsifier = sparsifier_with("a")
    scheduler = Halving(sparsifier, "sparsity_level")
    sparsifier.step = lambda: None
    with pytest.warns(UserWarning, match="has been replaced"):
        scheduler.step()


def test_data_that_comes_later_is_scheduled():
    sparsifier = sparsifier_with("a", level=0.8)
    scheduler = LinearScheduler(sparsifier, "sparsity_level", steps=4)
    assert levels(sparsifier) == {"a": 0}
    sparsifier.step()
    scheduler.step()
    sparsifier.add_data("later", torch.randn(4, 4), sparsity_level=0.4)
    sparsifier.step()
    scheduler.step()
    assert levels(sparsifier) == {"a": pytest.approx(0.4), "later": pytest.approx(0.2)}
    assert scheduler.base_param == {"a": 0.8, "later": 0.4}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda s: StepScheduler(s, "sparsity_level", step_size=2, gamma=0.5), [0.8, 0.8, 0.4, 0.4, 0.2]),
        (lambda s: StepScheduler(s, "sparsity_level", gamma=2.0), [0.8, 1.0, 1.0, 1.0, 1.0]),
        (lambda s: StepScheduler(s, "sparsity_level", gamma=0.1, bounds=(0.3, 0.9)), [0.8, 0.3, 0.3, 0.3, 0.3]),
        (lambda s: LinearScheduler(s, "sparsity_level", steps=4), [0.0, 0.2, 0.4, 0.6, 0.8]),
        (lambda s: CubicScheduler(s, "sparsity_level", steps=2), [0.0, 0.7, 0.8, 0.8, 0.8]),
        (lambda s: ExponentialScheduler(s, "sparsity_level", start=0.2, steps=2), [0.2, 0.4, 0.8, 0.8, 0.8]),
    ],
)
def test_the_ready_made_ones_and_their_resumption(make, expected):
    sparsifier = sparsifier_with("a")
    scheduler = make(sparsifier)
    seen, saved = [levels(sparsifier)["a"]], None
    for epoch in range(4):
        sparsifier.step()
        scheduler.step()
        seen.append(levels(sparsifier)["a"])
        if epoch == 1:
            saved = copy.deepcopy((sparsifier.state_dict(), scheduler.state_dict()))
    assert seen == pytest.approx(expected)
    # Go on from the third epoch in new objects: nothing is skipped, nothing is done twice.
    again = sparsifier_with("a")
    resumed = make(again)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert levels(again)["a"] == pytest.approx(expected[2])
    for epoch in (3, 4):
        again.step()
        resumed.step()
        assert levels(again)["a"] == pytest.approx(expected[epoch])
    assert resumed.last_epoch == 4


def test_a_scheduler_made_in_a_later_epoch_begins_there():
    sparsifier = sparsifier_with("a", level=0.4)
    scheduler = Halving(sparsifier, "sparsity_level", last_epoch=3)
    assert levels(sparsifier) == {"a": 0.4}, "the epoch that is finished is not begun again"
    sparsifier.step()
    scheduler.step()
    assert levels(sparsifier) == {"a": 0.2}
    assert scheduler.last_epoch == 4


def test_a_state_dict_aliases_nothing():
    sparsifier = sparsifier_with("a")
    scheduler = Halving(sparsifier, "sparsity_level")
    saved = scheduler.state_dict()
    saved["base_param"]["a"] = 9
    assert scheduler.base_param == {"a": 0.8}
    assert "data_sparsifier" not in saved


def test_verbose_says_what_changes(capsys):
    sparsifier = sparsifier_with("a")
    LinearScheduler(sparsifier, "sparsity_level", steps=4, verbose=True)
    assert capsys.readouterr().out == "sparsity_level of a is 0.0 from epoch 0 on\n"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda s: StepScheduler(s, "sparsity_level", step_size=0), "step_size must be an integer >= 1, got 0"),
        (lambda s: LinearScheduler(s, "sparsity_level", steps=-1), "steps must be an integer >= 0, got -1"),
        (lambda s: ExponentialScheduler(s, "sparsity_level", start=0.0), "start must be above 0"),
        (lambda s: CubicScheduler(s, "sparsity_level", bounds=(1.0, 0.0)), "bounds must be"),
    ],
)
def test_wrong_settings_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make(sparsifier_with("a"))


def test_a_copied_sparsifier_counts_for_itself():
    sparsifier = sparsifier_with("a")
    Halving(sparsifier, "sparsity_level")
    again = copy.deepcopy(sparsifier)
    again.step()
    assert sparsifier._step_count == 0
    assert gradcomp.data is not None


def test_going_on_by_the_last_epoch_alone():
    sparsifier = sparsifier_with("a")
    scheduler = StepScheduler(sparsifier, "sparsity_level")
    for _ in range(2):
        sparsifier.step()
        scheduler.step()
    again = DataNormSparsifier()
    again.load_state_dict(sparsifier.state_dict())
    resumed = StepScheduler(again, "sparsity_level", last_epoch=scheduler.last_epoch)
    again.step()
    resumed.step()
    assert levels(again)["a"] == pytest.approx(0.1)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_schedulers_are_copied_with_their_sparsifiers(way):
    scheduler = way(CubicScheduler(sparsifier_with("a"), "sparsity_level", steps=2))
    scheduler.data_sparsifier.step()
    scheduler.step()
    assert levels(scheduler.data_sparsifier)["a"] == pytest.approx(0.7)


def test_a_step_of_the_objects_own_and_what_it_returns():
    class Returns(DataNormSparsifier):
        def step(self):
            super().step()
            return "stepped"

    sparsifier = Returns([("a", torch.randn(4, 4))])
    Halving(sparsifier, "sparsity_level")
    assert sparsifier.step() == "stepped"
    other = sparsifier_with("a")
    calls = []
    other.step = lambda: calls.append(1)
    scheduler = Halving(other, "sparsity_level")
    other.step()
    scheduler.step()
    assert calls == [1]


def test_upstreams_flag_is_set_within_a_step():
    seen = []

    class Looks(Halving):
        def get_schedule_param(self):
            seen.append(self._get_sp_called_within_step)
            return super().get_schedule_param()

    assert not Looks(sparsifier_with("a"), "sparsity_level")._get_sp_called_within_step
    assert seen == [True]
