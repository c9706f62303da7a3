"""One mask core: ten lines of update_mask on gradients, on tensors at rest and on activations."""

import torch
from nets import given_ddp, loss_of, mixed_ddp, reduced, register, tokens
from ranks import run_ranks
from torch import nn

import gradcomp
from gradcomp.core.rules import fill_mask
from gradcomp.data import BaseDataScheduler, BaseDataSparsifier, DataNormSparsifier, LinearScheduler


class LargestRows(BaseDataSparsifier):
    """Keeps the ``density`` share of the rows with the largest sum of magnitudes."""

    def update_mask(self, name, data, density, **config):
        norms = data.abs().flatten(1).sum(1)
        count = max(1, round(density * len(norms)))
        left_out = norms.topk(len(norms) - count, largest=False).indices
        self.state[name]["mask"][left_out] = 0


def on_gradients(rank):
    sparsifier = LargestRows(density=0.25)
    sparsifier.data_groups["w"] = {"density": 0.5}  # by parameter name, over the defaults
    model, handle = given_ddp({"w": torch.zeros(4, 3), "v": torch.zeros(8, 2)}, sparsifier, fallback="never")
    scheduler = LinearScheduler(sparsifier, "density", start=1.0, steps=2)
    rows = torch.arange(1.0, 5).view(4, 1).expand(4, 3)
    seen = []
    for _ in range(3):
        out = reduced(model, {"w": rows, "v": torch.arange(8.0).view(8, 1).expand(8, 2)})
        seen.append((out["w"][:, 0].tolist(), int(out["v"][:, 0].count_nonzero())))
        sparsifier.step()  # nothing at rest: gradients alone
        scheduler.step()
    assert not any("mask" in state for state in sparsifier.state.values()), "the hook gives the mask back"
    return seen, handle.residual("w")[:, 0].tolist()


def test_the_same_object_serves_gradients_data_and_activations():
    for seen, residual in run_ranks(2, on_gradients):
        assert seen[0] == ([1, 2, 3, 4], 2), "a data scheduler drives the density of a gradient rule: from everything"
        assert seen[1] == ([0, 2, 3, 4], 2), "over three quarters"
        assert seen[2] == ([0, 0, 3, 4], 2), "to a half"
        assert residual == [2, 2, 0, 0]
    # The same ten lines on a tensor at rest,
    sparsifier = LargestRows(density=0.25)
    table = nn.Embedding(8, 3)
    with torch.no_grad():
        table.weight.copy_(torch.arange(8.0).view(8, 1).expand(8, 3))
    sparsifier.add_data("table", table)
    sparsifier.step()
    sparsifier.squash_mask()
    assert table.weight[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 6, 7]
    # and on an activation, in a forward hook.
    layer = nn.Linear(3, 3)

    def keep_largest_rows(module, inputs, output):
        mask = torch.zeros(output.shape, dtype=torch.bool)
        fill_mask(sparsifier, "activation", output, mask)
        return output * mask

    layer.register_forward_hook(keep_largest_rows)
    out = layer(torch.randn(8, 3))
    assert int((out.abs().sum(1) > 0).sum()) == 2
    assert sparsifier.get_mask("table").sum() == 6, "neither use touches the other's masks"


def norm_on_gradients(rank):
    """A ready-made data sparsifier as a gradient rule, on a network whose names have dots."""
    model = mixed_ddp()
    sparsifier = DataNormSparsifier(sparsity_level=0.9)
    handle = register(model, sparsifier, overrides={"head.weight": gradcomp.TopK(0.05)}, fallback="never")
    for step in range(3):
        model.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
    return handle.densities["hidden.weight"], handle.densities["conv.weight"], model.module.hidden.weight.grad


def test_a_ready_made_sparsifier_is_a_gradient_rule():
    results = run_ranks(2, norm_on_gradients)
    for hidden, conv, grad in results:
        assert abs(hidden - 0.1) < 0.005
        assert abs(conv - 0.1) < 0.05
        assert torch.equal(grad, results[0][2])


def test_data_and_gradients_of_the_same_name_do_not_meet():
    sparsifier = LargestRows(density=0.5)
    data = torch.ones(4, 2)
    sparsifier.add_data("w", data)
    sparsifier.state["w"]["mine"] = 7
    sparsifier.step()
    kept = sparsifier.get_mask("w").clone()
    mask = torch.zeros(4, 2, dtype=torch.bool)
    fill_mask(sparsifier, "w", torch.arange(8.0).view(4, 2).flip(0), mask)
    assert mask[:, 0].tolist() == [True, True, False, False]
    assert torch.equal(sparsifier.get_mask("w"), kept)
    assert sparsifier.state["w"]["mine"] == 7


class Always(BaseDataScheduler):
    def get_schedule_param(self):
        return dict.fromkeys(self.data_sparsifier.data_groups, 0.25)


def test_a_scheduler_of_ones_own_sets_gradient_settings_too():
    sparsifier = LargestRows(density=1.0)
    sparsifier.data_groups["w"] = {}
    Always(sparsifier, "density")
    mask = torch.zeros(4, 2, dtype=torch.bool)
    fill_mask(sparsifier, "w", torch.arange(8.0).view(4, 2), mask)
    assert mask.sum() == 2
