"""What the README says in code and numbers."""

import re
from pathlib import Path

import torch
from nets import mixed_ddp
from ranks import run_ranks

import gradcomp

README = (Path(__file__).parents[2] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def snippets(rank):
    """Every Python snippet in order, in one name space, each registering on a model of its own."""
    names = {"torch": torch, "dist": torch.distributed, "gradcomp": gradcomp, "rule": gradcomp.TopK(0.01), "tensor": torch.randn(40, 40)}
    ran = 0
    for snippet in SNIPPETS:
        model = mixed_ddp()
        tokens = names["inputs"] = torch.zeros(1, 3, dtype=torch.int64)
        names |= {"model": model, "net": model.module, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
        if "..." in snippet:  # save, then restart
            before, after = snippet.split("...\n")
            gradcomp_handle = names["handle"] = gradcomp.register(model)
            model(tokens).sum().backward()
            exec(before, names)
            names["model"] = mixed_ddp()
            exec(after, names)
            assert torch.equal(names["handle"].residual("head.weight"), gradcomp_handle.residual("head.weight"))
        else:
            if "loss" in snippet and "loss =" not in snippet:
                names["loss"] = model(tokens).sum()
            exec(snippet, names)
        ran += 1
    return ran


def test_every_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(SNIPPETS) >= 6
    assert run_ranks(2, snippets) == [len(SNIPPETS)] * 2


def test_the_bytes_by_hand():
    section = README.split("## The bytes, by hand")[1].split("In the hook")[0]
    rows = [re.findall(r"`([0-9a-f ]+)`", line.split("|")[1]) for line in section.splitlines() if line.startswith("| `")]
    by_hand = bytes.fromhex(" ".join(" ".join(row) for row in rows))
    chosen = gradcomp.compress(torch.tensor([0, 0, 3.0, 0, 0, 0, -1.5, 0, 0, 2.0]), gradcomp.Threshold(1.0))
    assert gradcomp.codec.encode(chosen).numpy().tobytes() == by_hand


def test_the_table_of_ratios():
    rows = re.findall(r"\| ([\d.]+)% \| ([\d.]+) \| ([\d.]+)x \| ([\d.]+)x \| ([\d.]+)x \| ([\d.]+)x \|", README)
    assert len(rows) == 4
    numel = 10_000_000
    for density, bits, *ratios in rows:
        count = int(numel * float(density) / 100)
        index_bits = gradcomp.codec.index_bits(numel, count)
        assert abs(index_bits / count - float(bits)) <= 0.05
        for ratio, width in zip(ratios, (32, 16, 8, 1)):
            assert abs(32 * numel / (index_bits + count * width) / float(ratio) - 1) < 0.02


def test_every_file_it_names_exists():
    root = Path(__file__).parents[2]
    for name in re.findall(r"`((?:tests|scripts|benchmarks)/[\w/.]+)", README):
        assert (root / name).exists(), name
    tree = README.split("## The tree")[1]
    rooms = re.split(r"^  (\w+)/", tree.split("\ntests/")[0], flags=re.MULTILINE)
    assert rooms[1::2] == ["core", "ddp", "data", "cli", "integrations"]
    for room, text in zip(rooms[1::2], rooms[2::2]):
        listed = set(re.findall(r"^    (\w+\.py)", text, re.MULTILINE))
        assert listed == {file.name for file in (root / "gradcomp" / room).glob("*.py")} - {"__init__.py"}
