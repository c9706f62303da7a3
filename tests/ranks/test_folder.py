"""save and load: one folder for all ranks, a new process, another world size, and what must not be loaded."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nets import given_ddp, loss_of, mixed_ddp, reduced, register, tokens
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.ddp.folder import sources

RULES = {"topk": gradcomp.TopK(0.05), "threshold": gradcomp.Threshold(0.02)}


def trained(rank, folder, rule, first, last, values="bf16"):
    """Train from step ``first`` to ``last``, from the folder if that is not the beginning, and into the folder."""
    model = mixed_ddp()
    handle = register(model, overrides={"*.weight": RULES[rule]}, values=values)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if first:
        gradcomp.load(handle, f"{folder}/hook")
        saved = torch.load(f"{folder}/model.pt", weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        if step == 3 and rank == 1:
            handle.flush()  # announced on one rank, and saved before it is done
    gradcomp.save(handle, f"{folder}/hook")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/model.pt")
    return [p.detach().clone() for p in model.parameters()], {name: handle.residual(name) for name, _ in model.module.named_parameters()}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_6_a_new_process_continues_bit_for_bit(tmp_path, rule):
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    straight.mkdir()
    parts.mkdir()
    expected = run_ranks(2, trained, str(straight), rule, 0, 9)
    for first, last in ((0, 4), (4, 6), (6, 9)):
        resumed = run_ranks(2, trained, str(parts), rule, first, last)
    for (weights, residuals), (others, other_residuals) in zip(expected, resumed):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, others))
        assert all(torch.equal(residuals[name], other_residuals[name]) for name in residuals)
    assert not torch.equal(expected[0][1]["head.weight"], expected[1][1]["head.weight"]), "each rank has its own residual"


def test_who_takes_over_from_whom():
    assert [list(sources(rank, 4, 2)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(sources(rank, 2, 4)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(sources(rank, 3, 2)) for rank in range(3)] == [[0, 1]] * 3
    assert [list(sources(rank, 2, 3)) for rank in range(2)] == [[0, 1, 2]] * 2
    for saved in range(1, 9):
        for world_size in range(1, 9):
            weight = dict.fromkeys(range(saved), 0.0)
            for rank in range(world_size):
                chosen = sources(rank, world_size, saved)
                for source in chosen:
                    weight[source] += 1 / len(chosen) / world_size
            assert all(value == pytest.approx(1 / saved) for value in weight.values()), "every saved rank counts alike"


SHAPES = {"a": (40, 40), "b": (7,), "c": (50, 50), "d": (9000,)}


def dyadic(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randint(-512, 513, shape, generator=generator) / 64 for name, shape in SHAPES.items()}


def in_another_world(rank, folder, first, last):
    shapes = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    overrides = {"b": gradcomp.Dense(), "d": gradcomp.Dense(), "c": gradcomp.Threshold(6.0), "*": gradcomp.TopK(0.05)}
    model, handle = given_ddp(shapes, None, "bf16", overrides=overrides, ddp={"bucket_cap_mb": 0.02}, fallback="never")
    if first:
        gradcomp.load(handle, folder)
    loaded = {name: handle.residual(name).double() for name in SHAPES}
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(first, last):
        for name, grad in reduced(model, dyadic(rank, step)).items():
            total[name] += grad.double()
    gradcomp.save(handle, folder)
    return loaded, total, {name: handle.residual(name).double() for name in SHAPES}, handle.state_dict()["step"]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 2), (2, 1), (2, 3), (3, 2)])
def test_another_world_size_keeps_the_pending_mean(tmp_path, before, after):
    first = run_ranks(before, in_another_world, str(tmp_path), 0, 3)
    second = run_ranks(after, in_another_world, str(tmp_path), 3, 6)
    for name in SHAPES:
        pending = sum(residual[name] for _, _, residual, _ in first) / before
        taken_over = sum(loaded[name] for loaded, *_ in second) / after
        if name in ("a", "c"):
            assert pending.count_nonzero() > 100
        if after % before == 0:
            assert torch.equal(taken_over, pending), name
        torch.testing.assert_close(taken_over, pending, rtol=1e-6, atol=1e-6)
        # And over both runs nothing is lost.
        exact = sum(dyadic(rank, step)[name].double() for rank in range(before) for step in range(3)) / before
        exact = exact + sum(dyadic(rank, step)[name].double() for rank in range(after) for step in range(3, 6)) / after
        left = sum(residual[name] for _, _, residual, _ in second) / after
        torch.testing.assert_close(first[0][1][name] + second[0][1][name] + left, exact, rtol=0, atol=1e-4)
    assert all(step == 6 for *_, step in second)


def saved_only(rank, folder, steps, density=0.05):
    model = mixed_ddp()
    handle = register(model, gradcomp.TopK(density))
    for step in range(steps):
        loss_of(model, tokens(rank, step)).backward()
    gradcomp.save(handle, folder)
    return handle.residual("head.weight")


def load_refused(rank, folder, words, run_first):
    """Every rank raises, whatever rank it is that cannot load, and none has loaded anything."""
    model = mixed_ddp()
    handle = register(model, gradcomp.TopK(0.05))
    if run_first:
        loss_of(model, tokens(rank, 7)).backward()
    before = handle.state_dict()
    with pytest.raises((ValueError, gradcomp.DesyncError), match=words) as caught:
        gradcomp.load(handle, folder)
    after = handle.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after["residual"][name], before["residual"][name]) for name in before["residual"])
    assert {key: after[key] for key in after if key != "residual"} == {key: before[key] for key in before if key != "residual"}
    model.zero_grad()
    loss_of(model, tokens(rank, 0)).backward()  # and training can begin
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("run_first", [False, True])
def test_what_is_not_whole_is_not_loaded(tmp_path, run_first):
    folder = tmp_path / "hook"
    words = "folder must hold a state that gradcomp.save finished"
    assert {kind for kind, _ in run_ranks(2, load_refused, str(folder), words, run_first)} == {"ValueError"}
    run_ranks(2, saved_only, str(folder), 3)
    (files,) = [sorted(folder.glob("*.distcp"))]
    assert len(files) == 2
    hidden = files[1].rename(tmp_path / "hidden")
    seen = run_ranks(2, load_refused, str(folder), r"rank 1's in .* cannot be read|refused, .*rank 1's in", run_first)
    assert [kind for kind, _ in seen] == ["DesyncError", "ValueError"]
    files[1].write_bytes(hidden.read_bytes()[:-2000])
    seen = run_ranks(2, load_refused, str(folder), r"rank 1's in .* cannot be read|refused, .*rank 1's in", run_first)
    assert [kind for kind, _ in seen] == ["DesyncError", "ValueError"]


def test_another_model_is_not_loaded(tmp_path):
    run_ranks(2, in_another_world, str(tmp_path), 0, 1)
    seen = run_ranks(2, load_refused, str(tmp_path), r"state\['parameters'\] must be those of the model", False)
    for kind, text in seen:
        assert kind == "ValueError"
        assert "a: [40, 40] instead of nothing" in text
        assert "more" in text


def other_format(rank, folder):
    handle = register(mixed_ddp())
    state = handle.state_dict()
    handle.state_dict = lambda: {**state, "format": 99}
    gradcomp.save(handle, folder)


def test_another_format_is_not_loaded(tmp_path):
    run_ranks(2, other_format, str(tmp_path))
    for kind, text in run_ranks(2, load_refused, str(tmp_path), "another version of gradcomp", False):
        assert kind == "ValueError"
        assert "must be 1, got 99" in text


def foreign(rank, folder):
    import torch.distributed.checkpoint as dcp

    dcp.save({"weights": torch.ones(3)}, checkpoint_id=folder)


def test_another_checkpoint_is_not_loaded(tmp_path):
    run_ranks(2, foreign, str(tmp_path))
    for kind, _ in run_ranks(2, load_refused, str(tmp_path), "holds another checkpoint", False):
        assert kind == "ValueError"


def mixed_steps(rank, folder):
    """The same folder, saved by one rank from another step: as when files of two runs are thrown together."""
    model = mixed_ddp()
    handle = register(model, gradcomp.TopK(0.05))
    loss_of(model, tokens(rank, 0)).backward()
    handle._agenda.number += rank
    gradcomp.save(handle, folder)


@pytest.mark.parametrize("world_size", [1, 2])
def test_files_of_different_steps_are_not_loaded(tmp_path, world_size):
    run_ranks(2, mixed_steps, str(tmp_path))
    words = r"differs from the others in \['step'\]" if world_size == 1 else "rank 1 disagrees with rank 0 on step: 2 against 1"
    for kind, _ in run_ranks(world_size, load_refused, str(tmp_path), words, False):
        assert kind == ("ValueError" if world_size == 1 else "DesyncError")


def cut_off(rank, folder):
    """A save that fails half-way leaves no state, rather than half of the new and half of the old."""
    model = mixed_ddp()
    handle = register(model, gradcomp.TopK(0.05))
    loss_of(model, tokens(rank, 0)).backward()
    gradcomp.save(handle, folder)
    if rank == 1:
        torch.save, kept = None, torch.save
    with pytest.raises(gradcomp.GradcompError, match=r"could not be saved in .*: rank 1: TypeError"):
        gradcomp.save(handle, folder)
    if rank == 1:
        torch.save = kept
    with pytest.raises(ValueError, match="finished"):
        gradcomp.load(handle, folder)
    gradcomp.save(handle, folder)
    gradcomp.load(handle, folder)
    return True


def test_a_save_that_is_cut_off_leaves_no_state(tmp_path):
    assert run_ranks(2, cut_off, str(tmp_path)) == [True, True]


def by_subgroup(rank, folder):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(torch.nn.Linear(40, 40), process_group=groups[rank // 2])
    handle = register(model, gradcomp.TopK(0.05), fallback="never")
    model(torch.full((1, 40), rank + 1.0)).sum().backward()
    own = f"{folder}/{rank // 2}"
    gradcomp.save(handle, own)
    kept = handle.residual("weight")
    model(torch.ones(1, 40)).sum().backward()
    assert not torch.equal(handle.residual("weight"), kept)
    gradcomp.load(handle, own)
    return torch.equal(handle.residual("weight"), kept)


def test_subgroups_have_a_folder_each(tmp_path):
    assert run_ranks(4, by_subgroup, str(tmp_path)) == [True] * 4


def without_a_group(rank, folder):
    dist.destroy_process_group()
    state = gradcomp.SparseState(torch.nn.Linear(40, 40))
    errors = []
    for call in (gradcomp.save, gradcomp.load):
        with pytest.raises(ValueError, match="init_process_group") as caught:
            call(state, folder)
        errors.append(str(caught.value))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return len(errors)


def test_without_a_process_group_there_is_nothing_to_save_with(tmp_path):
    assert run_ranks(1, without_a_group, str(tmp_path)) == [2]


def into_nowhere(rank, folder):
    handle = register(mixed_ddp())
    Path(folder, "file").write_text("x")
    Path(folder, "taken", ".metadata").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    texts = []
    for wrong in (f"{folder}/file", f"{folder}/file/below", f"{folder}/taken", "x" * 300, None, 7):
        with pytest.raises(gradcomp.GradcompError, match="could not be saved in folder") as caught:
            gradcomp.save(handle, wrong)
        texts.append(str(caught.value))
        with pytest.raises((ValueError, gradcomp.DesyncError), match="folder must hold a state"):
            gradcomp.load(handle, wrong)
    return texts


def test_a_folder_that_cannot_be_is_an_error_on_every_rank(tmp_path):
    for texts in run_ranks(2, into_nowhere, str(tmp_path), timeout_s=20):
        assert "rank 0: FileExistsError" in texts[0]
        assert len(texts) == 6


def looks_like_ours(rank, folder):
    import torch.distributed.checkpoint as dcp

    dcp.save({"0/state": torch.frombuffer(bytearray(b"[1, 2]"), dtype=torch.uint8)}, checkpoint_id=folder)


def test_a_checkpoint_that_looks_like_ours_is_not_loaded(tmp_path):
    run_ranks(1, looks_like_ours, str(tmp_path))
    for kind, _ in run_ranks(2, load_refused, str(tmp_path), "holds another checkpoint", False):
        assert kind == "ValueError"
