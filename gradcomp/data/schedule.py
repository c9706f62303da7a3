"""A hyper-parameter of a data sparsifier over epochs.

The public contract is that of ``torch.ao.pruning._experimental.data_scheduler``; the ready-made ones stand on :mod:`gradcomp.schedule`.
"""

import abc
import copy
import sys
import weakref
from functools import wraps
from typing import Any

from gradcomp.core.schedule import Cubic, Exponential, Linear, Schedule
from gradcomp.data.base import BaseDataSparsifier
from gradcomp.errors import warn


class BaseDataScheduler(abc.ABC):
    """Sets one entry of a sparsifier's configuration, by name, at every :meth:`step`.

    Args:
        data_sparsifier: whose ``data_groups`` are set; names that are added later are scheduled too.
        schedule_param: the entry, such as ``sparsity_level``.
        last_epoch: -1 to begin; the last epoch of a scheduler before to continue from there, with the sparsifier's configuration as it
            is and the first values that its state remembers.
        verbose: print every change.

    Raises:
        TypeError: ``data_sparsifier`` is not a :class:`BaseDataSparsifier`.

    Attributes:
        base_param: name -> the entry's first value.
        last_epoch: the current epoch.
    """

    def __init__(self, data_sparsifier: BaseDataSparsifier, schedule_param: str, last_epoch: int = -1, verbose: bool = False) -> None:
        if not isinstance(data_sparsifier, BaseDataSparsifier):
            raise TypeError(f"data_sparsifier must be a gradcomp.data.BaseDataSparsifier, got a {type(data_sparsifier).__name__}")
        self.data_sparsifier = data_sparsifier
        self.schedule_param = schedule_param
        self.base_param: dict[str, Any] = {}
        self.last_epoch = last_epoch
        self.verbose = verbose
        self._last_param: dict[str, Any] = {}
        self._step_count = 0
        self._get_sp_called_within_step = False
        _count_steps(data_sparsifier)
        data_sparsifier._step_count = 0  # type: ignore[attr-defined]
        self._note_new_names()
        if last_epoch < 0:
            self.step()
        else:  # an epoch that is finished is not begun again
            self._step_count = 1
            self._last_param = self._current()

    @abc.abstractmethod
    def get_schedule_param(self) -> dict[str, Any]:
        """Name -> the entry's value in epoch ``self.last_epoch``."""

    def _current(self) -> dict[str, Any]:
        return {name: config.get(self.schedule_param) for name, config in self.data_sparsifier.data_groups.items()}

    def _note_new_names(self) -> None:
        """Note first values, here and in the state of the data, which is saved with the sparsifier."""
        key, states = f"initial_{self.schedule_param}", self.data_sparsifier.state
        for name, value in self._current().items():
            if name not in self.base_param:
                held = states.get(name, {})
                self.base_param[name] = held.get(key, value) if self.last_epoch >= 0 else value
                if held and value is not None:
                    held[key] = self.base_param[name]

    def get_last_param(self) -> dict[str, Any]:
        """Name -> the value that the last step set."""
        return self._last_param

    def step(self) -> None:
        """Begin the next epoch; to be called after the sparsifier's own step."""
        if self._step_count == 1:
            self._warn_about_order()
        self._step_count += 1
        self.last_epoch += 1
        self._note_new_names()
        self._get_sp_called_within_step = True
        try:
            values = self.get_schedule_param()
        finally:
            self._get_sp_called_within_step = False
        self._apply(values)
        self._last_param = self._current()
        self.data_sparsifier.enable_mask_update = True

    def _apply(self, values: dict[str, Any]) -> None:
        groups = self.data_sparsifier.data_groups
        for name, value in values.items():
            if name in groups:
                groups[name][self.schedule_param] = value
                if self.verbose:
                    sys.stdout.write(f"{self.schedule_param} of {name} is {value} from epoch {self.last_epoch} on\n")

    def _warn_about_order(self) -> None:
        if not hasattr(self.data_sparsifier.step, "_with_counter"):
            text = "data_sparsifier.step has been replaced since the scheduler was made: call it before scheduler.step()"
        elif self.data_sparsifier._step_count < 1:  # type: ignore[attr-defined]
            text = "scheduler.step() was called before data_sparsifier.step(): the first value of the schedule is skipped"
        else:
            return
        warn(text)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the sparsifier, which has a ``state_dict`` of its own. A copy."""
        return copy.deepcopy({key: value for key, value in self.__dict__.items() if key != "data_sparsifier"})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; the sparsifier's configuration gets the values of that epoch."""
        self.__dict__.update(copy.deepcopy(state_dict))
        self._apply(self._last_param)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _count_steps(self.data_sparsifier)

    def __repr__(self) -> str:
        return f"{type(self).__name__} (\n{self.data_sparsifier!r}\n  {self.schedule_param}: {self.base_param}\n)"


def _count_steps(sparsifier: BaseDataSparsifier) -> None:
    """Count calls of the sparsifier's step from now on, without a reference that keeps it alive."""
    if getattr(sparsifier.step, "_with_counter", False):
        return
    reference = weakref.ref(sparsifier)
    replaced = vars(sparsifier).get("step")  # an object's own step goes before its class's
    function = type(sparsifier).step

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        instance = reference()
        if instance is None:
            return None
        instance._step_count += 1  # type: ignore[attr-defined]
        return function(instance, *args, **kwargs) if replaced is None else replaced(*args, **kwargs)

    counted._with_counter = True  # type: ignore[attr-defined]
    sparsifier.step = counted  # type: ignore[method-assign]


class _Follows(BaseDataScheduler):
    """Follows a :class:`gradcomp.schedule.Schedule` made from each name's first value; clamped."""

    bounds: tuple[float, float]

    def schedule_of(self, base: float) -> Schedule:
        """The schedule of a name whose first value is ``base``."""
        raise NotImplementedError

    def get_schedule_param(self) -> dict[str, Any]:
        """Name -> the schedule's value in this epoch, within the bounds; what has no value is left alone."""
        low, high = self.bounds
        bases = {name: value for name, value in self.base_param.items() if value is not None}
        return {name: min(high, max(low, self.schedule_of(value).at(self.last_epoch))) for name, value in bases.items()}

    def _take_bounds(self, bounds: tuple[float, float]) -> None:
        if not bounds[0] <= bounds[1]:
            raise ValueError(f"bounds must be (lowest, highest), got {bounds!r}")
        self.bounds = bounds


class StepScheduler(_Follows):
    """The first value times ``gamma`` every ``step_size`` epochs, within ``bounds``."""

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str,
        step_size: int = 1,
        gamma: float = 0.5,
        last_epoch: int = -1,
        verbose: bool = False,
        bounds: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        if isinstance(step_size, bool) or not isinstance(step_size, int) or step_size < 1:
            raise ValueError(f"step_size must be an integer >= 1, got {step_size!r}")
        self.step_size, self.gamma = step_size, gamma
        self._take_bounds(bounds)
        super().__init__(data_sparsifier, schedule_param, last_epoch, verbose)

    def schedule_of(self, base: float) -> Schedule:
        """Stairs from ``base``."""
        return _Stairs(base, self.gamma, self.step_size)


class _Stairs:
    def __init__(self, start: float, factor: float, every: int) -> None:
        self._start, self._factor, self._every = start, factor, every

    def at(self, step: int) -> float:
        return float(self._start * self._factor ** (max(0, step) // self._every))


class _Ramps(_Follows):
    """From ``start`` to the first value in ``steps`` epochs, in the way of ``ramp``."""

    ramp: Any

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str,
        start: float = 0.0,
        steps: int = 10,
        last_epoch: int = -1,
        verbose: bool = False,
        bounds: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.ramp(start=start, end=1.0, steps=steps)  # refuses what is out of its range
        self.start, self.steps = start, steps
        self._take_bounds(bounds)
        super().__init__(data_sparsifier, schedule_param, last_epoch, verbose)

    def schedule_of(self, base: float) -> Schedule:
        """A ramp to ``base``."""
        schedule: Schedule = self.ramp(start=self.start, end=base, steps=self.steps)
        return schedule


class LinearScheduler(_Ramps):
    """A straight line from ``start`` to the first value in ``steps`` epochs, within ``bounds``."""

    ramp = Linear


class CubicScheduler(_Ramps):
    """From ``start`` to the first value in ``steps`` epochs, fast at first (Zhu and Gupta, 2017), within ``bounds``."""

    ramp = Cubic


class ExponentialScheduler(_Ramps):
    """From ``start``, above 0, to the first value, by the same factor in each of ``steps`` epochs, within ``bounds``."""

    ramp = Exponential

    def __init__(
        self,
        data_sparsifier: BaseDataSparsifier,
        schedule_param: str,
        start: float = 0.01,
        steps: int = 10,
        last_epoch: int = -1,
        verbose: bool = False,
        bounds: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        super().__init__(data_sparsifier, schedule_param, start, steps, last_epoch, verbose, bounds)
