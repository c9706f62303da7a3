import pytest
from hypothesis import settings

from gradcomp.core.compiled import kernels

# The first call of a numpy or torch function can take longer than hypothesis allows an example; how long is not what is tested.
settings.register_profile("gradcomp", deadline=None)
settings.load_profile("gradcomp")


@pytest.fixture(scope="module", params=["numpy", "compiled"])
def either_way(request):
    """Run a module's tests without numba's kernels, and again with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADCOMP_COMPILED", "0" if request.param == "numpy" else "1")
        kernels.cache_clear()
        if request.param == "compiled":
            pytest.importorskip("numba")
        assert (kernels() is None) == (request.param == "numpy")
        yield request.param
    kernels.cache_clear()


@pytest.fixture(params=["host", "device"])
def either_device(request, monkeypatch):
    """Run a test of real processes on the CPU's own path, and again on that of CUDA tensors (which the CPU can take too)."""
    monkeypatch.setenv("GRADCOMP_ON_DEVICE", "1" if request.param == "device" else "0")
