"""Sparse int8 embeddings: exact zeros, every mode, every place."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradcomp.data import DataError, DataNormSparsifier, QuantizedEmbedding, QuantizedEmbeddingBag, post_training_sparse_quantize
from gradcomp.data.quantize import rows_to_int8


class Model(nn.Module):
    """Embeddings in several places, a shared one, tied tables, names that differ by a dot only."""

    def __init__(self):
        super().__init__()
        self.a_b = nn.Embedding(12, 8)
        self.a = nn.ModuleDict({"b": nn.EmbeddingBag(12, 8, mode="mean")})
        self.bags = nn.ModuleList([nn.EmbeddingBag(12, 8, mode=mode) for mode in ("sum", "mean", "max")])
        self.shared = self.a_b
        self.tied = nn.Embedding(12, 8)
        self.tied.weight = self.bags[0].weight
        self.head = nn.Linear(8, 2)

    def forward(self, ids):
        bags = sum(bag(ids) for bag in (self.a["b"], *self.bags))
        return self.head(bags + self.a_b(ids).mean(1) + self.shared(ids).sum(1) + self.tied(ids).sum(1))


def tables(model):
    return {name: module for name, module in model.named_modules() if hasattr(module, "num_embeddings")}


def dense(module):
    weight = module.weight() if callable(module.weight) else module.weight
    return (weight.dequantize() if weight.is_quantized else weight).detach()


@pytest.mark.parametrize("backend", ["auto", "gradcomp"])
@pytest.mark.parametrize("sparsify_first", [True, False])
def test_sparse_and_quantized_in_both_orders(sparsify_first, backend):
    torch.manual_seed(0)
    model = Model()
    linear = model.head.weight.detach().clone()
    before = {name: dense(module).clone() for name, module in tables(model).items()}
    ids = torch.randint(0, 12, (5, 3))
    options = {"sparsity_level": 0.5, "sparse_block_shape": (1, 4)}
    returned = post_training_sparse_quantize(model, DataNormSparsifier, sparsify_first, backend=backend, **options)
    assert returned is model
    for name, module in tables(model).items():
        table = dense(module)
        sparse = DataNormSparsifier([("x", before[name].clone())], **options)
        sparse.step()
        expected = sparse.get_data("x", return_original=False)
        assert (table == 0).float().mean() == pytest.approx(0.5, abs=0.02), "exact zeros, near the level"
        if sparsify_first:
            assert bool((table[expected == 0] == 0).all())
        scale = before[name].abs().amax(1, keepdim=True) / 127
        assert ((table - before[name]).abs() <= scale)[table != 0].all()
    assert model.shared is model.a_b
    assert torch.equal(dense(model.tied), dense(model.bags[0])), "tied tables stay one"
    assert torch.equal(model.head.weight, linear)
    twin = Model()
    twin.load_state_dict({**{f"{name}.weight": dense(module) for name, module in tables(model).items()}, "shared.weight": dense(model.a_b),
                          "head.weight": model.head.weight, "head.bias": model.head.bias})  # fmt: skip
    torch.testing.assert_close(model(ids), twin(ids), rtol=1e-4, atol=1e-4)
    if backend == "gradcomp":
        assert {type(module) for module in tables(model).values()} == {QuantizedEmbedding, QuantizedEmbeddingBag}
        assert model.tied.int8.data_ptr() == model.bags[0].int8.data_ptr()


def test_auto_takes_torchs_modules_where_they_compute_the_same():
    from torch.ao.nn import quantized

    model = Model()
    post_training_sparse_quantize(model, DataNormSparsifier)
    assert type(model.a_b) is quantized.Embedding
    assert type(model.bags[0]) is quantized.EmbeddingBag
    assert [type(bag) for bag in (model.bags[1], model.bags[2], model.a["b"])] == [QuantizedEmbeddingBag] * 3
    with pytest.raises(ValueError, match="no EmbeddingBag of mode 'mean'"):
        post_training_sparse_quantize(Model(), DataNormSparsifier, backend="torch")
    only = nn.Sequential(nn.Embedding(4, 8))
    post_training_sparse_quantize(only, DataNormSparsifier, backend="torch")
    assert type(only[0]) is quantized.Embedding


def test_selected_embeddings_only():
    model = Model()
    chosen = [model.a["b"], model.bags[2]]
    post_training_sparse_quantize(model, DataNormSparsifier, select_embeddings=chosen, backend="gradcomp", sparsity_level=0.5)
    assert isinstance(model.a["b"], QuantizedEmbeddingBag)
    assert isinstance(model.bags[2], QuantizedEmbeddingBag)
    assert isinstance(model.a_b, nn.Embedding)
    for wrong, words in (
        (model.a_b, "must be a list"),
        ([model.head], "must be made of Embedding"),
        ([nn.Embedding(2, 2)], "must be modules of the model"),
    ):
        for kind in (AssertionError, DataError):
            with pytest.raises(kind, match=words):
                post_training_sparse_quantize(model, DataNormSparsifier, select_embeddings=wrong)
    with pytest.raises(ValueError, match="backend must be one of"):
        post_training_sparse_quantize(model, DataNormSparsifier, backend="fast")


@pytest.mark.parametrize("sparsify_first", [True, False])
def test_a_root_embedding_is_returned_quantized(sparsify_first):
    root = nn.EmbeddingBag(12, 8, mode="mean")
    new = post_training_sparse_quantize(root, DataNormSparsifier, sparsify_first, sparsity_level=0.5)
    assert isinstance(new, QuantizedEmbeddingBag)
    assert (new.weight() == 0).float().mean() == pytest.approx(0.5, abs=0.05)


def twins(**options):
    bag = nn.EmbeddingBag(12, 8, **options)
    int8, scales = rows_to_int8(bag.weight)
    with torch.no_grad():
        bag.weight.copy_(int8.float() * scales[:, None])
    chosen = {key: options[key] for key in ("mode", "include_last_offset", "padding_idx") if key in options}
    return bag, QuantizedEmbeddingBag(int8, scales, **chosen)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_every_kind_of_bag_computes_what_the_original_does(mode, padding_idx):
    bag, ours = twins(mode=mode, padding_idx=padding_idx)
    ids = torch.tensor([[1, 3, 1], [3, 3, 5]])
    torch.testing.assert_close(ours(ids), bag(ids))
    flat, offsets = torch.tensor([1, 2, 3, 3, 7, 11]), torch.tensor([0, 2, 2, 4])
    torch.testing.assert_close(ours(flat, offsets), bag(flat, offsets))
    torch.testing.assert_close(ours(flat[:0], offsets[:1]), bag(flat[:0], offsets[:1]))
    if mode == "sum":
        weights = torch.rand(6)
        torch.testing.assert_close(ours(flat, offsets, weights), bag(flat, offsets, per_sample_weights=weights))
    last, ours_last = twins(mode=mode, padding_idx=padding_idx, include_last_offset=True)
    ends = torch.tensor([0, 2, 6])
    torch.testing.assert_close(ours_last(flat, ends), last(flat, ends))
    again = copy.deepcopy(ours)
    assert torch.equal(again(ids), ours(ids))


def test_int8_rows():
    weight = torch.tensor([[0.0, 1.0, -2.0], [0, 0, 0], [1e-30, 3e38, 0]])
    int8, scales = rows_to_int8(weight)
    assert int8.dtype == torch.int8
    assert int8.tolist() == [[0, 64, -127], [0, 0, 0], [0, 127, 0]]
    assert bool(((int8.float() * scales[:, None] - weight).abs() <= scales[:, None] / 2).all())
    embedding = QuantizedEmbedding(int8, scales)
    assert torch.equal(embedding(torch.tensor([[1, 0]])), F.embedding(torch.tensor([[1, 0]]), embedding.weight()))
    assert "int8" in repr(embedding)
    with pytest.raises(ValueError, match="weight must be finite"):
        rows_to_int8(torch.tensor([[float("nan")]]))


def test_max_norm_is_applied_once_and_for_all():
    embedding = nn.Embedding(6, 4, max_norm=1.0)
    with torch.no_grad():
        embedding.weight.mul_(10)
    ids = torch.arange(6)
    new = post_training_sparse_quantize(copy.deepcopy(embedding), DataNormSparsifier, backend="gradcomp", sparsity_level=0.0)
    torch.testing.assert_close(new(ids), embedding(ids).detach(), rtol=0, atol=0.01)


class TimesTen(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 10


def test_what_computes_something_else_is_left_alone():
    special, plain = TimesTen(6, 4), nn.Embedding(6, 4)
    normed = nn.utils.parametrizations.weight_norm(nn.Embedding(6, 4))
    model = nn.ModuleList([special, normed, plain])
    post_training_sparse_quantize(model, DataNormSparsifier, backend="gradcomp")
    assert model[0] is special
    assert model[1] is normed
    assert isinstance(model[2], QuantizedEmbedding)
    for module in (special, normed):
        with pytest.raises(DataError, match="must be plain"):
            post_training_sparse_quantize(model, DataNormSparsifier, select_embeddings=[module])


def test_nothing_is_changed_where_something_cannot_be():
    model = nn.ModuleList([nn.Embedding(6, 4), nn.EmbeddingBag(6, 4, mode="max")])
    before = [module.weight.detach().clone() for module in model]
    with pytest.raises(ValueError, match="no EmbeddingBag of mode 'max'"):
        post_training_sparse_quantize(model, DataNormSparsifier, backend="torch")
    with torch.no_grad():
        model[1].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="weight must be finite"):
        post_training_sparse_quantize(model, DataNormSparsifier)
    assert [type(module) for module in model] == [nn.Embedding, nn.EmbeddingBag]
    assert torch.equal(model[0].weight, before[0])


def test_hooks_and_mode_go_along():
    calls = []
    model = nn.Sequential(nn.Embedding(6, 4))
    model[0].register_forward_hook(lambda *_: calls.append(1))
    model.eval()
    post_training_sparse_quantize(model, DataNormSparsifier)
    model(torch.tensor([1, 2]))
    assert calls == [1]
    assert not model[0].training


def test_bags_with_a_last_offset_are_ours():
    bag = nn.EmbeddingBag(6, 4, mode="sum", include_last_offset=True)
    new = post_training_sparse_quantize(copy.deepcopy(bag), DataNormSparsifier, sparsity_level=0.0)
    assert isinstance(new, QuantizedEmbeddingBag)
    ids = torch.tensor([[1, 2], [3, 4], [5, 0]])
    torch.testing.assert_close(new(ids), bag(ids).detach(), rtol=0, atol=0.05)
