import threading
import time

from gradcomp.ddp import lastcalls


def test_the_end_waits_for_callbacks_that_are_still_held():
    def callback():
        return None

    held = [lastcalls.at_exit_wait_for(callback)]
    assert held[0] is callback
    assert callback in lastcalls._alive
    del callback
    threading.Timer(0.2, held.clear).start()
    start = time.monotonic()
    lastcalls._wait()
    assert not held, "the wait ends after the callback was let go"
    assert time.monotonic() - start < lastcalls.LONGEST_WAIT_S


def test_the_end_does_not_wait_for_ever(monkeypatch):
    def callback():
        return None

    lastcalls.at_exit_wait_for(callback)
    monkeypatch.setattr(lastcalls, "LONGEST_WAIT_S", 0.05)
    lastcalls._wait()
    assert callback in lastcalls._alive
