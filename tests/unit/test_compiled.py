"""The compiled passes against the numpy ones and against the obvious: bit for bit."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcomp.core import compiled, feedback, scan
from gradcomp.core.feedback import Feedback

pytest.importorskip("numba")

SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, -3e38])
FLOATS = st.lists(st.one_of(SPECIAL, st.floats(width=32)), min_size=1, max_size=700)


@pytest.fixture(autouse=True)
def kernels():
    found = compiled.kernels()
    assert found is not None
    return found


def numpy_ways(patch, *modules):
    for module in modules:
        patch.setattr(module, "kernels", lambda: None)


@given(FLOATS, st.integers(0, 99), st.sampled_from([0.0, 0.5, 1.0, 3e38]), st.booleans())
def test_above(numbers, seed, threshold, with_residual):
    data = torch.tensor(numbers, dtype=torch.float32)
    residual = torch.randn(data.numel(), generator=torch.Generator().manual_seed(seed)) if with_residual else None
    acc = scan.Accumulation(data, residual, fp32=True)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = data.numpy() if residual is None else residual.numpy() + data.numpy()
    expected = np.flatnonzero(~(np.abs(sums) <= np.float32(threshold)))
    indices, values = scan.above(acc, threshold)
    assert np.array_equal(indices, expected)
    assert values.tobytes() == sums[expected].tobytes()


@pytest.mark.parametrize("numel", [1, 7, 8, 255, 256, 257, scan.CHUNK - 1, scan.CHUNK, scan.CHUNK + 3])
def test_above_finds_everything_at_every_length(numel):
    data = torch.full((numel,), 2.0)
    indices, values = scan.above(scan.Accumulation(data, torch.ones(numel), fp32=True), 2.5)
    assert np.array_equal(indices, np.arange(numel))
    assert bool((values == 3).all())


def test_a_strided_tensor_is_scanned_as_it_lies():
    data = torch.arange(40.0)[::3]
    indices, values = scan.above(scan.Accumulation(data), 20.0)
    assert np.array_equal(values, data[data > 20].numpy())
    assert np.array_equal(indices, np.flatnonzero(data.numpy() > 20))


@given(FLOATS, st.data())
def test_largest(numbers, draw):
    values = np.array(numbers, np.float32)
    k = draw.draw(st.integers(1, values.size))
    magnitude = np.where(np.isnan(values), np.inf, np.abs(values))
    expected = np.sort(np.argsort(-magnitude, kind="stable")[:k])
    indices, kept = scan.keep_largest(np.arange(values.size) * 3, values, k)
    assert np.array_equal(indices, expected * 3)
    assert kept.tobytes() == values[expected].tobytes()


@given(st.integers(1, 3000), st.integers(1, 4), st.floats(0, 1), st.integers(0, 99), st.sampled_from([1.0, 0.5, 1 / 3, 1024.0]))
def test_complete(numel, world_size, density, seed, unscale):
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(world_size):
        indices = np.flatnonzero(rng.random(numel) < density)
        parts.append((indices, rng.standard_normal(indices.size).astype(np.float32)))
    gradient = rng.standard_normal(numel).astype(np.float32)
    residual = rng.standard_normal(numel).astype(np.float32)
    own = int(rng.integers(world_size))

    books, given_gradient = Feedback(), torch.from_numpy(gradient.copy())
    books.replace({"x": torch.from_numpy(residual.copy())})
    books.complete("x", given_gradient, parts, own=own, weight=1 / world_size, unscale=unscale)

    kept = residual + gradient * np.float32(unscale)
    kept[parts[own][0]] -= parts[own][1] * np.float32(unscale)
    mean = np.zeros(numel, np.float32)
    for indices, values in parts:
        mean[indices] += values * np.float32(1 / world_size)
    assert books.get("x").numpy().tobytes() == kept.tobytes()
    assert given_gradient.numpy().tobytes() == mean.tobytes()

    with pytest.MonkeyPatch.context() as patch:
        numpy_ways(patch, feedback)
        again, given_again = Feedback(), torch.from_numpy(gradient.copy())
        again.replace({"x": torch.from_numpy(residual.copy())})
        again.complete("x", given_again, parts, own=own, weight=1 / world_size, unscale=unscale)
    assert torch.equal(given_again, given_gradient)
    assert torch.equal(again.get("x"), books.get("x"))


BROKEN = {
    "import": "class Finder:\n    def find_spec(self, name, *_):\n        if name == 'numba': raise OSError('cannot load')\n"
    "sys.meta_path.insert(0, Finder())\n",
    "compile": "import numba\ndef njit(*_, **__):\n    raise TypeError('no compiler')\nnumba.njit = njit\n",
}


@pytest.mark.parametrize("how", sorted(BROKEN))
def test_a_broken_numba_costs_time_and_no_more(how):
    program = (
        f"import sys, warnings\n{BROKEN[how]}import torch, gradcomp\nfrom gradcomp.core.compiled import kernels\n"
        "with warnings.catch_warnings(record=True) as caught:\n    warnings.simplefilter('always')\n"
        "    found = gradcomp.compress(torch.arange(-500.0, 500.0), gradcomp.TopK(0.01))\n"
        "print(kernels(), len(found.indices), [str(w.message) for w in caught if 'numba' in str(w.message)])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("None 10 ")
    assert done.stdout.count("gradcomp: numba is installed but does not work") == 1


def test_kept_machine_code_that_is_damaged_is_made_anew(tmp_path):
    program = (
        "import torch, gradcomp\nfrom gradcomp.core.compiled import kernels\n"
        "print(kernels() is not None, len(gradcomp.compress(torch.arange(9.0), gradcomp.TopK(0.5)).indices))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def ran():
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment).stdout.split()

    assert ran() == ["True", "5"]
    kept = list(tmp_path.rglob("*.nbi"))
    assert kept
    for file in kept:
        file.write_bytes(file.read_bytes()[:20])
    assert ran() == ["True", "5"]


def test_without_numba_everything_still_works():
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch, gradcomp\nfrom gradcomp.core.compiled import kernels\n"
        "t = torch.arange(-500.0, 500.0)\n"
        "found = gradcomp.codec.decode(gradcomp.codec.encode(gradcomp.compress(t, gradcomp.TopK(0.01)), 'fp32'))\n"
        "print(kernels(), found.indices.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split(None, 1)[0] == "None"
    assert done.stdout.split(None, 1)[1].strip() == str([*range(6), *range(996, 1000)])


def test_importing_gradcomp_does_not_import_numba():
    program = "import sys, gradcomp; print('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "False"
