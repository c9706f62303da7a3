import pytest
import torch
from nets import Mixed, given_ddp, reduced
from ranks import run_ranks

import gradcomp


def draw(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {"a": torch.randn(100, 100, generator=generator), "b": torch.randn(50, generator=generator)}


def analysed(rank):
    overrides = {"a": gradcomp.TopK(0.01), "b": gradcomp.Dense()}
    model, handle = given_ddp({"a": torch.zeros(100, 100), "b": torch.zeros(50)}, None, overrides=overrides)
    assert handle.densities == {}
    reduced(model, draw(rank, 0))
    assert handle.densities == {"a": 0.01, "b": 1.0}
    sent_before = handle.traffic.sent_bytes
    analysis = handle.analyze()
    assert "not ready" in str(analysis)
    with pytest.raises(ValueError, match="not ready"):
        analysis.threshold(0.01)
    expected = (handle.residual("a") + draw(rank, 1)["a"]).abs()
    reduced(model, draw(rank, 1))
    cost = handle.traffic.sent_bytes - sent_before
    reduced(model, draw(rank, 2))
    assert analysis.ready
    assert list(analysis) == ["a", "b"]
    assert analysis["a"].quantile(1.0) == expected.max().item(), "residual and gradient, of the step after the call alone"
    everything = torch.cat([expected.view(-1), draw(rank, 1)["b"].abs()])
    for density in (0.001, 0.01, 0.1, 0.5):
        threshold = analysis.threshold(density)
        assert (everything > threshold).float().mean().item() == pytest.approx(density, abs=2e-4)
        assert analysis.density(threshold) == pytest.approx(density, abs=2e-4)
    assert analysis.density(0.0) == 1
    assert analysis.payload_bytes("a", 0.01) == gradcomp.codec.index_bytes(10_000, 100) + 200
    assert analysis.payload_bytes("a", 0.01, "sign") == gradcomp.codec.index_bytes(10_000, 100) + 13
    for wrong in (lambda: analysis.threshold(0), lambda: analysis.payload_bytes("a", 2), lambda: analysis.payload_bytes("x", 0.1)):
        with pytest.raises(ValueError, match=r"must be"):
            wrong()
    text = str(analysis)
    assert f"Threshold({analysis.threshold(0.01):.3g}) would have sent 1% of all elements" in text
    return cost > 0


@pytest.mark.usefixtures("either_device")
def test_an_analysis_describes_the_next_step():
    assert run_ranks(2, analysed) == [True, True]


def test_an_analysis_that_never_ran_says_so():
    assert "not ready" in str(gradcomp.SparseState(Mixed()).analyze())
