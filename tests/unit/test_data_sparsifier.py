"""Data sparsifiers: the upstream contract, and each of upstream's faults that must not come back."""

import copy
import io
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from gradcomp.core.rules import fill_mask
from gradcomp.data import SUPPORTED_TYPES, BaseDataSparsifier, DataError, DataNormSparsifier, FakeSparsity, ThresholdSparsifier


class FirstRow(BaseDataSparsifier):
    """Leaves out the first row; counts its steps; has an attribute of its own."""

    def __init__(self, data_list=None, **defaults):
        self.own = "kept"
        super().__init__(data_list=data_list, **defaults)

    def update_mask(self, name, data, **config):
        mask = self.get_mask(name)
        assert bool((mask == 1).all()), "a step begins with ones"
        mask[0] = 0
        self.state[name]["steps"] = self.state[name].get("steps", 0) + 1


class BigEmbedding(nn.Embedding):
    pass


DATA = {
    "tensor": lambda: torch.randn(4, 3),
    "parameter": lambda: nn.Parameter(torch.randn(4, 3)),
    "embedding": lambda: nn.Embedding(4, 3),
    "bag": lambda: nn.EmbeddingBag(4, 3),
    "subclass": lambda: BigEmbedding(4, 3),
    "half": lambda: torch.randn(4, 3).half(),
    "integers": lambda: torch.arange(1, 13).view(4, 3),
    "row": lambda: torch.randn(4),
}


def weight_of(data):
    return data.weight if isinstance(data, nn.Module) else data


@pytest.mark.parametrize("kind", sorted(DATA))
def test_what_is_held_masked_stepped_and_squashed(kind):
    data = DATA[kind]()
    weight = weight_of(data)
    before = weight.detach().clone()
    sparsifier = FirstRow(level=3)
    returned = sparsifier.add_data("x", data)
    assert sparsifier.data_groups["x"] == {"level": 3}
    assert sparsifier.get_data("x") is weight, "the caller's own tensor"
    assert torch.equal(returned, before)
    assert sparsifier.get_mask("x").dtype == weight.dtype
    for _ in range(3):
        sparsifier.step()
    assert sparsifier.state["x"]["steps"] == 3
    left = sparsifier.get_data("x", return_original=False)
    assert not left[0].any()
    assert torch.equal(left[1:], before[1:])
    assert torch.equal(weight, before), "not changed before the squash"
    assert torch.equal(returned, left), "what add_data returned follows"
    assert is_parametrized(sparsifier._container, "x")
    sparsifier.squash_mask()
    assert not is_parametrized(sparsifier._container, "x")
    assert not weight[0].any()
    assert torch.equal(weight[1:], before[1:])
    assert weight.requires_grad == isinstance(weight, nn.Parameter)
    with pytest.raises(ValueError, match="'x' was squashed"):
        sparsifier.get_data("x")
    # After a squash nothing raises.
    sparsifier.step()
    sparsifier.squash_mask()
    assert sparsifier.state["x"]["steps"] == 3
    with pytest.warns(UserWarning, match="'x' is replaced"):
        sparsifier.add_data("x", DATA[kind]())
    sparsifier.step()
    assert not sparsifier.get_data("x", return_original=False)[0].any()


def test_a_squash_without_the_mask_leaves_the_data():
    data = torch.randn(4, 3)
    before = data.clone()
    sparsifier = FirstRow([("x", data), ("y", torch.ones(2, 2))])
    sparsifier.step()
    sparsifier.squash_mask(leave_parametrized=False, names=["x"])
    assert torch.equal(data, before)
    assert not is_parametrized(sparsifier._container, "x")
    assert is_parametrized(sparsifier._container, "y")
    with pytest.raises(ValueError, match="got 'z'"):
        sparsifier.squash_mask(names=["y", "z"])
    assert is_parametrized(sparsifier._container, "y"), "all or none"


def test_a_squashed_view_changes_its_base():
    base = torch.ones(6, 3)
    sparsifier = FirstRow([("x", base[2:5])])
    sparsifier.step()
    sparsifier.squash_mask()
    assert base.sum(1).tolist() == [3, 3, 0, 3, 3, 3]


def test_changes_of_the_data_from_outside_are_seen():
    embedding = nn.Embedding(4, 3)
    sparsifier = FirstRow([("x", embedding)])
    with torch.no_grad():
        embedding.weight.add_(1)
    assert torch.equal(sparsifier.get_data("x"), embedding.weight)
    embedding.weight.data = torch.ones(4, 3)
    assert torch.equal(sparsifier.get_data("x"), torch.ones(4, 3))


def test_gradients_flow_where_the_mask_is_one():
    weight = nn.Parameter(torch.ones(4, 3))
    sparsifier = FirstRow([("x", weight)])
    sparsifier.step()
    sparsifier.get_data("x", return_original=False).sum().backward()
    assert weight.grad.sum(1).tolist() == [0, 3, 3, 3]


def test_holding_a_parameter_leaves_its_gradient_hooks_alone():
    """As DDP's are: set_() on the parameter, which torch's own parametrization does, would lose them."""
    weight = nn.Parameter(torch.ones(4, 3))
    node, seen = weight.view_as(weight).grad_fn.next_functions[0][0], []
    node.register_hook(lambda *_: seen.append(1))
    sparsifier = FirstRow([("x", weight)])
    sparsifier.step()
    assert weight._version == 0
    weight.sum().backward()
    sparsifier.squash_mask()
    weight.sum().backward()
    assert len(seen) == 2


def test_what_the_mask_leaves_out_is_zero_whatever_it_was():
    data = torch.tensor([[float("nan"), float("inf")], [1.0, 2.0]])
    sparsifier = FirstRow([("x", data)])
    sparsifier.step()
    assert sparsifier.get_data("x", return_original=False).tolist() == [[0, 0], [1, 2]]


def test_masks_regrow_and_31_levels_do_not_compound():
    data = torch.randn(8, 8)
    sparsifier = DataNormSparsifier([("x", data)], sparsity_level=0.5)
    for _ in range(6):
        sparsifier.step()
        assert float(sparsifier.get_mask("x").mean()) == 0.5, "six steps at 50% are 50%, not 98%"
    largest = data.view(8, 2, 4).abs().mean(2).argmax()
    sparsifier.get_data("x").view(8, 2, 4)[largest // 2, largest % 2] = 0
    sparsifier.step()
    mask = sparsifier.get_mask("x").view(8, 2, 4)
    assert not mask[largest // 2, largest % 2].any()
    assert float(mask.mean()) == 0.5, "another block has come back"


def test_32_replacing_keeps_mask_and_configuration():
    sparsifier = FirstRow([("x", torch.randn(4, 3))], level=1, kind="a")
    sparsifier.add_data("y", torch.randn(4, 3), level=2)
    sparsifier.step()
    mask = sparsifier.get_mask("y")
    with pytest.warns(UserWarning, match="replaced"):
        returned = sparsifier.add_data("y", torch.ones(4, 3))
    assert sparsifier.data_groups["y"] == {"level": 2, "kind": "a"}
    assert sparsifier.get_mask("y") is mask
    assert sparsifier.state["y"]["steps"] == 1
    assert returned.sum(1).tolist() == [0, 3, 3, 3]
    with pytest.warns(UserWarning, match="replaced"):
        sparsifier.add_data("y", torch.ones(4, 3), kind="b", mask=torch.zeros(4, 3))
    assert sparsifier.data_groups["y"]["kind"] == "b"
    assert not sparsifier.get_data("y", return_original=False).any()
    with pytest.warns(UserWarning, match="replaced"):
        returned = sparsifier.add_data("y", torch.ones(7, 2), reuse_mask=False)
    assert returned.sum() == 14
    assert sparsifier.data_groups["y"] == {"level": 2, "kind": "b"}


def test_a_shorter_batch_uses_the_first_rows_and_the_next_whole_one_all_of_them():
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 1))
    batch = torch.arange(1.0, 13).view(6, 2)
    sparsifier.add_data("batch", batch)
    sparsifier.step()
    whole = sparsifier.get_mask("batch").clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        short = sparsifier.add_data("batch", torch.ones(4, 2))
        assert torch.equal(short, whole[:4])
        full = sparsifier.add_data("batch", torch.ones(6, 2))
        assert torch.equal(full, whole)
        for wrong in (torch.ones(7, 2), torch.ones(4, 3), torch.ones(4)):
            with pytest.raises(DataError, match=r"'batch' must have the shape of its mask, \(6, 2\), or fewer rows"):
                sparsifier.add_data("batch", wrong)
    assert torch.equal(sparsifier.get_data("batch", return_original=False), whole), "nothing was replaced"


@pytest.mark.parametrize("wrong", [[1.0, 2.0], "text", nn.Linear(2, 2), None, torch.eye(3).to_sparse()])
def test_other_data_is_refused_as_upstream_does_and_clearly(wrong):
    sparsifier = FirstRow()
    for kind in (AssertionError, ValueError, DataError):
        with pytest.raises(kind, match="data must be"):
            sparsifier.add_data("x", wrong)
    assert not sparsifier.data_groups
    with pytest.raises(DataError, match=r"mask of 'x' must be a tensor of the data's shape \(2, 2\), got \(3,\)"):
        sparsifier.add_data("x", torch.ones(2, 2), mask=torch.ones(3))
    assert {torch.Tensor, nn.Parameter, nn.Embedding, nn.EmbeddingBag} == SUPPORTED_TYPES


def test_names_of_every_kind_stay_apart():
    names = [
        "a.b",
        "a_b",
        "a%2Eb",
        "%a",
        "",
        "training",
        "forward",
        "parametrizations",
        "weight",
        "a.b.c",
        "state_dict",
        "hold",
        "name with spaces",
    ]
    sparsifier = FirstRow([(name, torch.full((2, 2), float(place + 1))) for place, name in enumerate(names)])
    sparsifier.step()
    for place, name in enumerate(names):
        assert sparsifier.get_data(name, return_original=False).tolist() == [[0, 0], [place + 1] * 2]
    again = FirstRow()
    again.load_state_dict(sparsifier.state_dict())
    assert list(again.data_groups) == names
    assert all(torch.equal(again.get_data(name), sparsifier.get_data(name)) for name in names)


def test_unknown_names_and_model_preparation():
    sparsifier = FirstRow([("x", torch.ones(2, 2))])
    for call in (sparsifier.get_data, sparsifier.get_mask):
        with pytest.raises(ValueError, match=r"one of the data's, \['x'\], got 'y'"):
            call("y")
    with pytest.raises(NotImplementedError):
        sparsifier.prepare(None, None)
    with pytest.raises(TypeError):
        BaseDataSparsifier()


def test_step_does_nothing_while_updates_are_off_and_leaves_no_graph():
    sparsifier = FirstRow([("x", nn.Parameter(torch.ones(2, 2)))])
    sparsifier.enable_mask_update = False
    sparsifier.step()
    assert sparsifier.get_mask("x").sum() == 4
    sparsifier.enable_mask_update = True
    sparsifier.step()
    assert not sparsifier.get_mask("x").requires_grad


class Halves(nn.Module):
    """A parametrization of the user's own."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, data):
        return torch.where(self.mask == 0, data / 2, data)


def mixed():
    sparsifier = FirstRow([("x", torch.randn(4, 3)), ("a.b", nn.Embedding(5, 2))], level=1)
    sparsifier.add_data("own", torch.ones(2, 2), parametrization=Halves)
    sparsifier.add_data("gone", torch.ones(3, 3))
    sparsifier.step()
    sparsifier.squash_mask(names=["gone"])
    sparsifier.enable_mask_update = False
    return sparsifier


def same(one, other):
    assert list(one.data_groups) == list(other.data_groups)
    for name in one.data_groups:
        assert one.data_groups[name] == other.data_groups[name]
        assert torch.equal(one.get_mask(name), other.get_mask(name))
        assert one.get_mask(name).layout == other.get_mask(name).layout == torch.strided
        assert torch.equal(one.get_data(name, return_original=False), other.get_data(name, return_original=False))
        assert one._container.is_covered(name) == other._container.is_covered(name)
        assert type(one._container.layer(name)) is type(other._container.layer(name))


def test_state_dicts_round_trip_and_alias_nothing():
    sparsifier = mixed()
    saved = sparsifier.state_dict()
    assert set(saved) == {"state", "data_groups", "_container"}
    assert all(state["mask"].layout == torch.sparse_coo for state in saved["state"].values())
    assert {"parametrizations.x.original", "gone"} <= set(saved["_container"])
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    again = FirstRow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch 2.11, about sparse tensors in files
        again.load_state_dict(torch.load(file, weights_only=False))
    same(sparsifier, again)
    saved["data_groups"]["x"]["level"] = 99
    saved["_container"]["gone"].zero_()
    saved["state"]["x"]["steps"] = 99
    assert sparsifier.data_groups["x"]["level"] == 1
    assert sparsifier.get_data("gone", return_original=False).sum() == 6
    assert sparsifier.state["x"]["steps"] == 1
    again.enable_mask_update = True
    again.step()
    assert again.state["x"]["steps"] == 2


def test_loading_strictly_resets_and_otherwise_merges():
    saved = mixed().state_dict()
    kept, mine = torch.ones(2, 3), torch.zeros(4, 3)
    sparsifier = FirstRow([("kept", kept), ("x", mine)])
    sparsifier.load_state_dict(saved, strict=False)
    assert set(sparsifier.data_groups) == {"kept", "x", "a.b", "own", "gone"}
    assert sparsifier.get_data("kept") is kept
    assert sparsifier.get_data("x") is mine, "it stays the tensor that was added"
    assert torch.equal(mine, saved["_container"]["parametrizations.x.original"])
    sparsifier.load_state_dict(saved)
    assert set(sparsifier.data_groups) == {"x", "a.b", "own", "gone"}
    damaged = copy.deepcopy(saved)
    del damaged["_container"]["gone"]
    with pytest.raises(ValueError, match="data of 'gone'"):
        sparsifier.load_state_dict(damaged)
    same(sparsifier, mixed_from(saved))


def mixed_from(saved):
    sparsifier = FirstRow()
    sparsifier.load_state_dict(saved)
    return sparsifier


@pytest.mark.parametrize("way", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_copies_keep_everything(way):
    sparsifier = mixed()
    again = way(sparsifier)
    same(sparsifier, again)
    assert again.enable_mask_update is False
    assert again.own == "kept"
    again.enable_mask_update = True
    again.step()
    assert again.state["x"]["steps"] == 2
    assert sparsifier.state["x"]["steps"] == 1
    again.get_data("x").zero_()
    assert sparsifier.get_data("x").any()


def test_a_copy_of_model_and_sparsifier_together_stays_together():
    model = nn.EmbeddingBag(4, 3)
    twin, again = copy.deepcopy((model, FirstRow([("x", model)])))
    again.step()
    again.squash_mask()
    assert not twin.weight[0].any()
    assert model.weight[0].all()


def test_masks_are_saved_smaller_than_a_bitmap(tmp_path):
    data = torch.randn(1000, 1000)
    sparsifier = DataNormSparsifier(
        [("a.b", data), ("row", torch.ones(7)), ("none", torch.ones(0, 3))], sparsity_level=0.99, sparse_block_shape=(1, 1)
    )
    sparsifier.step()
    sparsifier.save_masks(tmp_path / "masks")
    assert (tmp_path / "masks").stat().st_size < 1000 * 1000 / 8 / 5
    assert all(mask.dtype == torch.bool for mask in sparsifier.compact().values())
    other = DataNormSparsifier([("a.b", data), ("row", torch.ones(7)), ("none", torch.ones(0, 3))])
    other.load_masks(tmp_path / "masks")
    assert all(torch.equal(other.get_mask(name), sparsifier.get_mask(name)) for name in ("a.b", "row", "none"))
    sparsifier.squash_mask(leave_parametrized=False)
    with pytest.raises(ValueError, match=r"'a.b' must have the shape \(2, 2\), got \(1000, 1000\)"):
        DataNormSparsifier([("a.b", torch.ones(2, 2)), ("row", torch.ones(7)), ("none", torch.ones(0, 3))]).load_masks(tmp_path / "masks")
    torch.save({"other": 1}, tmp_path / "other")
    with pytest.raises(ValueError, match="must hold masks of save_masks"):
        other.load_masks(tmp_path / "other")


def test_importing_changes_no_warning_filters():
    code = "import warnings, torch; before = list(warnings.filters); import gradcomp.data; assert list(warnings.filters) == before"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_replaced_mask_tensor_is_taken_over():
    class Replaces(BaseDataSparsifier):
        def update_mask(self, name, data, **config):
            self.state[name]["mask"] = (data > 0).to(torch.int8)

    sparsifier = Replaces([("x", torch.tensor([-1.0, 2.0]))])
    mask = sparsifier.get_mask("x")
    sparsifier.step()
    assert sparsifier.get_mask("x") is mask
    assert mask.tolist() == [0, 1]
    assert mask.dtype == torch.float32
    assert sparsifier.get_data("x", return_original=False).tolist() == [0, 2]


# ThresholdSparsifier


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_threshold_keeps_what_equals_it(dtype):
    data = torch.tensor([[-2, 1], [0, 3]]).to(dtype)
    sparsifier = ThresholdSparsifier([("x", data)], threshold=2)
    sparsifier.add_data("t", data.t(), threshold=1)
    sparsifier.step()
    assert sparsifier.get_mask("x").tolist() == [[1, 0], [0, 1]]
    assert sparsifier.get_mask("t").tolist() == [[1, 0], [1, 1]]
    assert ThresholdSparsifier([("nan", torch.tensor(float("nan")))], threshold=9).step() is None


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), "1", None, True])
def test_a_wrong_threshold_is_refused(wrong):
    with pytest.raises(ValueError, match="threshold must be"):
        ThresholdSparsifier(threshold=wrong)


# DataNormSparsifier, against loops


def norm_mask(data, level, shape, zeros, norm):
    """The mask of a 2-D tensor by loops over blocks."""
    height, width = data.shape
    blocks = [
        [(i, j) for i in range(top, min(height, top + shape[0])) for j in range(left, min(width, left + shape[1]))]
        for top in range(0, height, shape[0])
        for left in range(0, width, shape[1])
    ]
    power = 1 if norm == "L1" else 2
    means = [sum(abs(float(data[at])) ** power for at in block) / len(block) for block in blocks]
    chosen = sorted(range(len(blocks)), key=lambda block: (means[block], block))[: max(0, min(len(blocks), round(level * len(blocks))))]
    mask = torch.ones(height, width)
    for block in chosen:
        for at in sorted(blocks[block], key=lambda at: abs(float(data[at])))[:zeros]:
            mask[at] = 0
    return mask


@settings(max_examples=150, deadline=None)
@given(
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    level=st.floats(-0.5, 1.5),
    zeros=st.integers(0, 16),
    norm=st.sampled_from(["L1", "L2"]),
    seed=st.integers(0, 1000),
)
def test_norm_masks_against_loops(height, width, shape, level, zeros, norm, seed):
    zeros = min(zeros, shape[0] * shape[1])
    data = torch.randperm(height * width, generator=torch.Generator().manual_seed(seed)).view(height, width).double() + 1
    data[:, ::2] *= -1
    sparsifier = DataNormSparsifier([("x", data)], level, shape, zeros, norm)
    sparsifier.step()
    assert torch.equal(sparsifier.get_mask("x").float(), norm_mask(data, level, shape, zeros, norm))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (5, 1), (1, 5), (0, 4), (3, 0), (2, 3, 4), (2, 3, 3, 3), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("level", [-1.0, 0.0, 0.3, 0.5, 1.0, 2.0])
def test_norm_levels_of_every_shape_stay_within_their_bounds(shape, dtype, level):
    data = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    for block, zeros in (((1, 4), 4), ((2, 2), 1), ((1, 1), 1), ((1, 4), 0)):
        sparsifier = DataNormSparsifier([("x", data)], level, block, zeros)
        sparsifier.step()
        mask = sparsifier.get_mask("x")
        assert mask.shape == data.shape
        left_out = int((mask == 0).sum())
        if not data.numel() or level <= 0 or zeros == 0:
            assert left_out == 0
            continue
        height, width = ([1, 1] + list(shape))[-2:] if len(shape) != 1 else (1, shape[0])
        blocks = -(-height // block[0]) * -(-width // block[1]) * (data.numel() // (height * width))
        chosen = round(blocks * min(level, 1.0))
        assert chosen <= left_out <= min(data.numel(), chosen * min(block[0] * block[1], zeros))
        if level >= 1 and zeros == block[0] * block[1]:
            assert left_out == data.numel()


def test_two_of_four():
    sparsifier = DataNormSparsifier([("x", torch.randn(16, 32))], sparsity_level=1.0, zeros_per_block=2, sparse_block_shape=(1, 4))
    sparsifier.step()
    assert sparsifier.get_mask("x").view(-1, 4).sum(1).unique().tolist() == [2]


def test_edges_are_not_favoured():
    """Blocks at a ragged edge are judged by the mean of what is there, not by the sum."""
    data = torch.ones(4, 5)
    data[:, 4] = 10
    sparsifier = DataNormSparsifier([("x", data)], sparsity_level=0.5)
    sparsifier.step()
    assert sparsifier.get_mask("x").tolist() == [[0, 0, 0, 0, 1]] * 4


def test_norm_settings_by_name_and_wrong_ones():
    sparsifier = DataNormSparsifier([("x", torch.randn(8, 8))])
    assert sparsifier.data_groups["x"] == {"sparsity_level": 0.5, "sparse_block_shape": (1, 4), "zeros_per_block": 4}
    sparsifier.add_data("small", torch.randn(8, 8), sparse_block_shape=(1, 2), norm="L2", sparsity_level=0.25)
    sparsifier.step()
    assert float(sparsifier.get_mask("small").mean()) == 0.75
    for zeros, words in ((5, "between 0 and the block's 4 elements, got 5"), (-1, "got -1")):
        sparsifier.add_data(f"wrong{zeros}", torch.randn(8, 8), zeros_per_block=zeros)
        with pytest.raises(ValueError, match=words):
            sparsifier.step()
        sparsifier._delete_data(f"wrong{zeros}")
    for kind in (AssertionError, ValueError):
        with pytest.raises(kind, match=r"norm must be one of \['L1', 'L2'\], got 'L3'"):
            DataNormSparsifier(norm="L3")
        with pytest.raises(kind, match="norm must be one of"):
            sparsifier.add_data("y", torch.ones(2, 2), norm="max")


def test_our_parametrization_checks_its_shape():
    with pytest.raises(ValueError, match=r"mask must have the data's shape \(2, 2\), got \(3,\)"):
        FakeSparsity(torch.ones(3))(torch.ones(2, 2))


# What attackers found


def test_a_backward_pass_after_a_step_works():
    weight = nn.Parameter(torch.ones(4, 3))
    sparsifier = FirstRow()
    value = sparsifier.add_data("x", weight)
    sparsifier.step()
    value.sum().backward()
    assert weight.grad.sum() == 12, "of the mask that the value was computed with"


def test_a_sparsifier_that_served_as_a_rule_saves_and_loads():
    sparsifier = DataNormSparsifier(sparse_block_shape=(1, 1))
    mask = torch.zeros(4, 4, dtype=torch.bool)
    fill_mask(sparsifier, "w", torch.randn(4, 4), mask)
    assert mask.sum() == 8
    sparsifier.add_data("x", torch.randn(8))
    sparsifier.data_groups["w"] = {"sparse_block_shape": (2, 4)}
    fill_mask(sparsifier, "w", torch.randn(4, 4), mask)
    assert mask.sum() == 8, "whole blocks, of whatever shape"
    again = DataNormSparsifier()
    again.load_state_dict(sparsifier.state_dict())
    assert list(again.state) == ["x"]
    assert again.data_groups["w"] == {"sparse_block_shape": (2, 4)}
    again.add_data("w", torch.randn(4, 4))
    again.step()
    assert again.get_mask("w").mean() == 0.5, "settings that were there before the data, over the defaults"


def test_the_whole_mask_is_saved_while_a_shorter_batch_is_held(tmp_path):
    sparsifier = DataNormSparsifier([("b", torch.randn(16, 4))], sparse_block_shape=(1, 1))
    sparsifier.step()
    whole = sparsifier.get_mask("b").clone()
    sparsifier.replace_data("b", torch.ones(9, 4))
    sparsifier.save_masks(tmp_path / "masks")
    for again in (DataNormSparsifier(), copy.deepcopy(sparsifier)):
        again.load_state_dict(sparsifier.state_dict())
        assert torch.equal(again.get_mask("b"), whole[:9])
        assert torch.equal(again.replace_data("b", torch.ones(16, 4)), whole)
        again.get_mask("b").fill_(1)
        again.load_masks(tmp_path / "masks")
        assert torch.equal(again.get_mask("b"), whole)


@pytest.mark.parametrize(
    ("data", "threshold", "expected"),
    [
        (torch.tensor([-128, -127, 0, 1], dtype=torch.int8), 2, [1, 1, 0, 0]),
        (torch.tensor([-(2**31), 1], dtype=torch.int32), 2, [1, 0]),
        (torch.tensor([True, False]), 0.5, [1, 0]),
        (torch.tensor([0.1], dtype=torch.float16), 0.1, [0]),
        (torch.tensor([0.0, 6e-8], dtype=torch.float16), 1e-9, [0, 1]),
        (torch.tensor([100j, 1]), 50, [1, 0]),
    ],
)
def test_thresholds_of_every_dtype(data, threshold, expected):
    sparsifier = ThresholdSparsifier([("x", data)], threshold=threshold)
    sparsifier.step()
    assert [int(bool(value)) for value in sparsifier.get_mask("x")] == expected


def test_norms_of_complex_huge_and_missing_numbers():
    def mask_of(values, **config):
        sparsifier = DataNormSparsifier([("x", values)], **config)
        sparsifier.step()
        return [int(bool(value)) for value in sparsifier.get_mask("x")]

    one = {"sparse_block_shape": (1, 1)}
    assert mask_of(torch.tensor([100j, 1, 2, 3]), sparsity_level=0.25, **one) == [1, 0, 1, 1]
    assert mask_of(torch.tensor([3e30, 2e30, 1e30, 4e30]), norm="L2", **one) == [1, 0, 0, 1]
    nan = float("nan")
    assert mask_of(torch.tensor([nan, 0.1, 5, 5, 6, 6, 7.0]), sparsity_level=0.25, sparse_block_shape=(1, 2)) == [1, 1, 0, 0, 1, 1, 1]


def test_nothing_is_half_loaded_or_half_replaced():
    sparsifier = FirstRow([("a", torch.ones(3, 2)), ("b", torch.ones(2, 2))])
    saved = sparsifier.state_dict()
    saved["state"]["b"]["mask"] = torch.ones(5, 5).to_sparse()
    with pytest.raises(ValueError, match=r"mask of 'b' must have its data's shape \(2, 2\), got \(5, 5\)"):
        sparsifier.load_state_dict(saved)
    assert set(sparsifier.data_groups) == {"a", "b"}

    class Wrong(nn.Module):
        def __init__(self, mask):
            super().__init__()

        def forward(self, data):
            return data.double()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="dtype"):
            sparsifier.add_data("a", torch.ones(3, 2), parametrization=Wrong)
    assert sparsifier.get_data("a").shape == (3, 2)


class Scaled(nn.Module):
    """A parametrization with a buffer and an inverse."""

    def __init__(self, mask):
        super().__init__()
        self.register_buffer("gain", torch.tensor(2.0))

    def forward(self, data):
        return data * self.gain

    def right_inverse(self, data):
        return data / self.gain


def test_parametrizations_keep_their_buffers_and_use_their_inverse():
    sparsifier = FirstRow()
    assert sparsifier.add_data("x", torch.tensor([2.0, 4.0]), parametrization=Scaled).tolist() == [2, 4]
    assert sparsifier.get_data("x").tolist() == [1, 2]
    sparsifier._container.layer("x").gain.fill_(5)
    again = FirstRow()
    again.load_state_dict(sparsifier.state_dict())
    assert again.get_data("x", return_original=False).tolist() == [5, 10]


def test_loading_refreshes_what_was_returned_and_expanded_data_squashes():
    data = torch.ones(4, 3)
    sparsifier = FirstRow()
    returned = sparsifier.add_data("x", data)
    stepped = FirstRow([("x", torch.full((4, 3), 2.0))])
    stepped.step()
    sparsifier.load_state_dict(stepped.state_dict())
    assert returned.sum(1).tolist() == [0, 6, 6, 6]
    expanded = torch.ones(1, 3).expand(4, 3)
    sparsifier.add_data("e", expanded, mask=torch.ones(1).expand(4, 3))
    sparsifier.step()
    sparsifier.squash_mask("ignored", names=["e"], sparsified=True)
    assert expanded.sum(1).tolist() == [0, 3, 3, 3]
    non_leaf = FirstRow([("n", nn.Parameter(torch.ones(2, 2)) * 2)])
    assert torch.equal(copy.deepcopy(non_leaf).get_data("n"), torch.full((2, 2), 2.0))


def test_masks_from_the_defaults_are_one_for_each_name():
    class Own(BaseDataSparsifier):
        def update_mask(self, name, data, **config):
            self.get_mask(name).copy_(data > 0)

    sparsifier = Own([("a", torch.tensor([1.0, -1])), ("b", torch.tensor([-1.0, 1]))], mask=torch.ones(2))
    sparsifier.step()
    assert sparsifier.get_mask("a").tolist() == [1, 0]
    assert sparsifier.get_mask("b").tolist() == [0, 1]


def test_computed_weights_and_unusual_dtypes_are_refused():
    sparsifier = FirstRow()
    with pytest.raises(DataError, match="must have its weight as a parameter"):
        sparsifier.add_data("x", nn.utils.parametrizations.weight_norm(nn.Embedding(4, 3)))
    with pytest.raises(DataError, match=r"dtype that torch computes with, got torch\.uint16"):
        sparsifier.add_data("x", torch.ones(2, dtype=torch.uint16))


def test_masks_of_upstreams_dictionaries_get_the_datas_dtype():
    saved = FirstRow([("x", torch.ones(2, 2))]).state_dict()
    saved["state"]["x"]["mask"] = torch.ones(2, 2, dtype=torch.int8).to_sparse()
    sparsifier = FirstRow()
    sparsifier.load_state_dict(saved)
    assert sparsifier.get_mask("x").dtype == torch.float32
