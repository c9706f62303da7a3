"""What a hook has once its process group is known."""

from collections.abc import Callable, Mapping
from typing import NamedTuple
from weakref import WeakMethod

from gradcomp.core.compiled import kernels
from gradcomp.core.feedback import Feedback
from gradcomp.core.rules import AnyRule
from gradcomp.ddp.agenda import Agenda
from gradcomp.ddp.completion import Completion
from gradcomp.ddp.device.backlog import Backlog
from gradcomp.ddp.exchange import Exchange
from gradcomp.ddp.layouts import Layouts
from gradcomp.ddp.network import Network
from gradcomp.ddp.settings import Settings
from gradcomp.ddp.traffic import Counters

HOSTS = frozenset({"cpu"})
"""Types of device that work while the host waits."""


class Connection(NamedTuple):
    """The collectives of the group, counted; where parameters lie in buckets and how they travel; what begins and ends steps."""

    exchange: Exchange
    layouts: Layouts
    completion: Completion | Backlog


def connect(
    exchange: Exchange,
    network: Network,
    rules: Mapping[str, AnyRule],
    settings: Settings,
    feedback: Feedback,
    agenda: Agenda,
    counters: Counters,
    failed: "WeakMethod[Callable[[Exception], None]]",
) -> Connection:
    """Decide what the world size and the device decide. Warns where compression was asked for and will not happen.

    ``failed``, which does not hold its object, is called with an error that is found some time after its step.
    """
    kernels()  # compiled now, not in the first step, where the peers would wait
    books = feedback, agenda, counters, settings
    completion = Completion(exchange, *books) if network.device.type in HOSTS else Backlog(*books, failed)
    feedback.move(network.device)
    layouts = Layouts(exchange, network, rules, settings, feedback, agenda, completion.settle)
    layouts.warn_if_inactive()
    return Connection(exchange, layouts, completion)
